"""Webhook events: what was delivered, waits or was given up, with each attempt."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from ....producer.operator_keys import Role
from ....producer.webhooks.events import EventState, WebhookEvent
from ....shared.errors import RequestNotFoundError, ValidationError
from ..access import Access
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..source import Moment, together

MOST_SHOWN = 100


async def _read(moment: Moment, params: Params, _: Access) -> View:
    state = params.get("state", EventState.DEAD.value)
    if state not in tuple(EventState):
        raise ValidationError(f"state must be one of {', '.join(EventState)}, got {state!r}")
    events = moment.source.events
    found, *counts = await together(events.newest(EventState(state), MOST_SHOWN), *map(events.count, EventState))
    by_state = dict(zip(map(str, EventState), counts, strict=True))
    rows = [_row(event) for event in found]
    return {"rows": rows, "state": state, "counts": by_state, "most": MOST_SHOWN, "facts": by_state, "now": moment.at}


def _row(event: WebhookEvent) -> dict[str, Any]:
    last = event.attempts[-1] if event.attempts else None
    parts = urlsplit(event.url)
    return {
        "event": event.event_id,
        "type": event.type,
        "state": event.state.value,
        "tenant": event.tenant,
        # What follows the path may be a secret of the receiver.
        "url": f"{parts.scheme}://{parts.hostname or ''}{parts.path}",
        "created_at": event.created_at,
        "attempts": event.num_attempts,
        "next_attempt_at": event.next_attempt_at if event.state is EventState.PENDING else None,
        "last_status": last and last.status,
        "last_error": last.error if last else "",
    }


async def _read_one(moment: Moment, params: Params, access: Access) -> View:
    event = await moment.source.events.show(field_of(params, "id"))
    row = _row(event)
    attempts = [msgspec.structs.asdict(attempt) for attempt in reversed(event.attempts)]
    body = event.body if access.sees_contents else ""
    return {"row": row, "rows": attempts, "body": body, "facts": {**row, "body": body or None}}


async def _replay(act: Act) -> str:
    event_id = field_of(act.form, "id")
    await act.source.operations.replay_webhook(event_id)
    return f"{event_id} is delivered again, under its own id"


async def _purge(act: Act) -> str:
    event_id = field_of(act.form, "id")
    if not await act.source.operations.purge_webhook(event_id):
        raise RequestNotFoundError(f"no webhook event {event_id!r} is known")
    return f"{event_id} is thrown away"


ROOM = Room(
    pages=(
        Page("webhooks", "/webhooks", "Webhooks · {state}", _read, query=("state",), nav="Webhooks"),
        Page("webhook", "/webhook", "{id} · webhook", _read_one, query=("id",), live=False),
    ),
    actions=(
        Action("/webhooks/replay", Role.OPERATOR, _replay, "webhooks"),
        Action("/webhooks/purge", Role.ADMIN, _purge, "webhooks", confirm="id"),
    ),
)
