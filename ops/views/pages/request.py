"""One request: where it stands, what it lived through, what it asks for, and its tokens as they come."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.operator_keys import Role
from ....shared.broker import Broker, RequestHistory
from ....shared.errors import RequestNotFoundError
from ....shared.keys import ModelKeys
from ....shared.messages.deltas import Delta
from ....shared.queue.request_events import RequestEvent, summary_of
from ....shared.queue.request_state import RequestState
from ....shared.queue.stats import RequestStatus
from ..access import Access
from ..asked import decode_asked
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..read_log import MAX_SHOWN_CHARS, ReadLog
from ..source import Moment, Source, together
from ..timeline import bars_of, handovers, spans_of

MOST_LOGS = 100
# Nothing more happens to what has expired, but that its id is given anew.
EXPIRED_KEPT_S = 30.0


async def _read(moment: Moment, params: Params, access: Access) -> View:
    source = moment.source
    model, request_id = (await moment.check_model(field_of(params, "model"))).model, field_of(params, "id")
    broker = await moment.once(("broker", model, request_id), lambda: source.broker_of(model, request_id))
    status = await (await moment.queue(model)).status(request_id)
    if status is None:
        return await _read_expired(moment, model, request_id)
    events, arrived_ms, payload, said = await together(
        RequestHistory(source.connection, broker.keys).history(request_id),
        source.connection.execute("HGET", broker.keys.request(request_id), "arrived_at"),
        _payload(source, broker.keys, status),
        _log_of(source, broker, request_id),
    )
    facts = _facts(status, said, int(arrived_ms or 0) / 1000)
    return {
        **_told(moment, model, status, events, facts),
        "said": said,
        "text": _tail(said.text) if said and access.sees_contents else "",
        "is_cut": said is not None and len(said.text) > MAX_SHOWN_CHARS,
        "asked": decode_asked(payload, access) if payload else None,
        "facts": {**facts, "text": said.text if said and access.sees_contents else None},
    }


async def _read_expired(moment: Moment, model: str, request_id: str) -> View:
    """What the model's events still tell of a request whose record is gone. To find them takes a walk over all."""

    async def walk() -> list[RequestEvent]:
        return await (await moment.source.history(model)).history(request_id)

    events = await moment.source.kept(("expired", model, request_id), EXPIRED_KEPT_S, walk)
    if not events:
        raise RequestNotFoundError(
            f"request {request_id!r} of {model} is unknown, or its result and its events have expired"
        )
    last = summary_of(events[-1])
    status = RequestStatus(
        request_id=request_id,
        state=last.state,
        tenant=last.tenant,
        band=last.band,
        position=None,
        estimated_start_s=None,
        num_output_tokens=last.num_output_tokens,
        num_attempts=last.num_attempts,
        engine_id=last.engine_id,
        deadline=None,
    )
    facts = _facts(status, None, last.arrived_at or events[0].at)
    if last.started_at is not None and last.arrived_at is not None:
        facts["queue_time_s"] = last.started_at - last.arrived_at
    facts["finish_reason"] = last.cause if last.state is RequestState.FINISHED else None
    facts["error"] = last.cause if last.state is not RequestState.FINISHED and last.cause else None
    told = _told(moment, model, status, events, facts)
    return {**told, "is_expired": True, "said": None, "text": "", "is_cut": False, "asked": None, "facts": facts}


def _told(moment: Moment, model: str, status: RequestStatus, events: list[RequestEvent], facts: View) -> View:
    """What both say: where it stands, and its timeline."""
    spans = spans_of(events, moment.at)
    return {
        "model": model,
        "request_id": status.request_id,
        "status": status,
        "is_expired": False,
        "row": facts,
        "rows": spans,
        "bars": bars_of(spans),
        "num_handovers": handovers(spans),
        "last_event": events[-1] if events else None,
        "now": moment.at,
    }


async def _payload(source: Source, keys: ModelKeys, status: RequestStatus) -> bytes | None:
    """The request as it was encoded: in its lane until its first claim, then by itself until its end."""
    request_id = status.request_id
    payload = await source.connection.execute("GET", keys.payload(request_id))
    if payload is not None or status.state is not RequestState.QUEUED:
        return payload
    entry = await source.connection.execute("HGET", keys.request(request_id), "entry")
    lane = keys.lane(status.band, status.tenant)
    found = await source.connection.execute("XRANGE", lane, entry, entry) if entry else []
    return next((dict(zip(pairs[::2], pairs[1::2], strict=False)).get(b"request") for _, pairs in found), None)


async def _log_of(source: Source, broker: Broker, request_id: str) -> Delta | None:
    """Read on where the last look ended."""
    key = (broker.keys.prefix, request_id)
    log = source.logs.pop(key, None) or ReadLog(broker)
    source.logs[key] = log
    if len(source.logs) > MOST_LOGS:
        source.logs.popitem(last=False)
    return await log.read_on(request_id)


def _facts(status: RequestStatus, said: Delta | None, arrived_at: float) -> dict[str, Any]:
    fields = msgspec.structs.asdict(status)
    fields["arrived_at"] = arrived_at or None
    fields["finish_reason"] = said.finish_reason.value if said and said.finish_reason else None
    fields["error"] = f"{said.error.code}: {said.error.message}" if said and said.error else None
    fields["prompt_tokens"] = said.usage.num_prompt_tokens if said and said.usage else None
    fields["cached_tokens"] = said.usage.num_cached_tokens if said and said.usage else None
    stats = said.stats if said else None
    for name in ("queue_time_s", "time_to_first_token_s", "inter_token_latency_s", "latency_s", "num_preemptions"):
        fields[name] = getattr(stats, name) if stats else None
    return fields


def _tail(text: str) -> str:
    return text[-MAX_SHOWN_CHARS:]


async def _cancel(act: Act) -> str:
    state = await act.source.operations.cancel(field_of(act.form, "model"), field_of(act.form, "id"))
    return "it is cancelled" if state is RequestState.CANCELLED else f"it had ended before: {state}"


ROOM = Room(
    pages=(Page("request", "/request", "{id} · request", _read, query=("model", "id")),),
    actions=(Action("/request/cancel", Role.OPERATOR, _cancel, "request"),),
)
