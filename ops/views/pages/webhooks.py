"""Webhook events that were delivered, wait or were given up, with their attempts."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from ....producer.control.secret_keys import Role
from ....producer.webhooks.events import EventState, WebhookEvent
from ....shared.errors import RequestNotFoundError, ValidationError
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot, together

MOST_SHOWN = 100
_STATE_WORDS = {EventState.PENDING: "waiting", EventState.DELIVERED: "delivered", EventState.DEAD: "given up"}


async def _read_webhooks(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    state = params.get("state", EventState.DEAD.value)
    if state not in tuple(EventState):
        raise ValidationError(f"state must be one of {', '.join(EventState)}, got {state!r}")
    events = snapshot.source.events
    newest, *counts = await together(events.newest(EventState(state), MOST_SHOWN), *map(events.count, EventState))
    by_state = dict(zip(map(str, EventState), counts, strict=True))
    rows = [_event_row(event) for event in newest]
    return {
        "rows": rows,
        "state": state,
        "words": {state.value: words for state, words in _STATE_WORDS.items()},
        "counts": by_state,
        "most": MOST_SHOWN,
        "facts": by_state,
        "now": snapshot.at,
    }


def _event_row(event: WebhookEvent) -> dict[str, Any]:
    last = event.attempts[-1] if event.attempts else None
    parts = urlsplit(event.url)
    return {
        "event": event.event_id,
        "type": event.type,
        "state": event.state.value,
        "tenant": event.tenant,
        # The query may contain a secret of the receiver.
        "url": f"{parts.scheme}://{parts.hostname or ''}{parts.path}",
        "created_at": event.created_at,
        "attempts": event.num_attempts,
        "next_attempt_at": event.next_attempt_at if event.state is EventState.PENDING else None,
        "last_status": last and last.status,
        "last_error": last.error if last else "",
    }


async def _read_one(snapshot: PageSnapshot, params: Params, access: Access) -> View:
    event = await snapshot.source.events.show(field_of(params, "id"))
    row = _event_row(event)
    attempts = [msgspec.structs.asdict(attempt) for attempt in reversed(event.attempts)]
    body = event.body if access.sees_contents else ""
    return {"row": row, "rows": attempts, "body": body, "facts": {**row, "body": body or None}}


async def _replay_event(context: ActionContext) -> str:
    event_id = field_of(context.form, "id")
    await context.source.operations.replay_webhook(event_id)
    return f"{event_id} is delivered again under the same id"


async def _purge_event(context: ActionContext) -> str:
    event_id = field_of(context.form, "id")
    if not await context.source.operations.purge_webhook(event_id):
        raise RequestNotFoundError(f"webhook event {event_id!r} does not exist")
    return f"{event_id} is purged"


SECTION = PageSection(
    pages=(
        Page("webhooks", "/webhooks", "Webhooks · {state}", _read_webhooks, query=("state",), nav="Webhooks"),
        Page("webhook", "/webhook", "{id} · webhook", _read_one, query=("id",), live=False),
    ),
    actions=(
        Action("/webhooks/replay", Role.OPERATOR, _replay_event, "webhooks"),
        Action("/webhooks/purge", Role.ADMIN, _purge_event, "webhooks", confirm="id"),
    ),
)
