"""One request: state, timeline, input, and its tokens while they are generated."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.control.secret_keys import Role
from ....shared.broker import Broker, RequestHistory
from ....shared.errors import RequestNotFoundError
from ....shared.keys import ModelKeys
from ....shared.messages.deltas import Delta
from ....shared.queue.lifecycle import RETRYABLE_STATES, RequestEvent, RequestState, summary_of
from ....shared.queue.stats import RequestStatus
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..request import MAX_SHOWN_CHARS, ReadLog, bars_of, decode_request_input, handovers, spans_of
from ..source import PageSnapshot, Source, together

MOST_LOGS = 100
# An expired request changes only if its id is reused.
EXPIRED_CACHED_S = 30.0


async def _read_request(snapshot: PageSnapshot, params: Params, access: Access) -> View:
    source = snapshot.source
    model, request_id = (await snapshot.check_model(field_of(params, "model"))).model, field_of(params, "id")
    broker = await snapshot.once(("broker", model, request_id), lambda: source.broker_of(model, request_id))
    status = await (await snapshot.queue(model)).status(request_id)
    if status is None:
        return await _read_expired(snapshot, model, request_id)
    events, arrived_ms, payload, output, can_retry = await together(
        RequestHistory(source.connection, broker.keys).history(request_id),
        source.connection.execute("HGET", broker.keys.request(request_id), "arrived_at"),
        _payload(source, broker.keys, status),
        _read_log(source, broker, request_id),
        source.connection.execute("EXISTS", broker.keys.retry(request_id)),
    )
    facts = _facts(status, output, int(arrived_ms or 0) / 1000)
    return {
        **_state_and_timeline(snapshot, model, status, events, facts),
        "can_retry": bool(can_retry) and status.state in RETRYABLE_STATES,
        "output": output,
        "text": _tail(output.text) if output and access.sees_contents else "",
        "is_cut": output is not None and len(output.text) > MAX_SHOWN_CHARS,
        "asked": decode_request_input(payload, access) if payload else None,
        "facts": {**facts, "text": output.text if output and access.sees_contents else None},
    }


async def _read_expired(snapshot: PageSnapshot, model: str, request_id: str) -> View:
    """Return what the model's events contain about an expired request. Finding them scans all events."""

    async def scan() -> list[RequestEvent]:
        return await (await snapshot.source.history(model)).history(request_id)

    events = await snapshot.source.cached(("expired", model, request_id), EXPIRED_CACHED_S, scan)
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
    view = _state_and_timeline(snapshot, model, status, events, facts)
    return {**view, "is_expired": True, "output": None, "text": "", "is_cut": False, "asked": None, "facts": facts}


def _state_and_timeline(
    snapshot: PageSnapshot, model: str, status: RequestStatus, events: list[RequestEvent], facts: View
) -> View:
    """Return the values that live and expired requests share."""
    spans = spans_of(events, snapshot.at)
    return {
        "model": model,
        "request_id": status.request_id,
        "status": status,
        "is_expired": False,
        "can_retry": False,
        "row": facts,
        "rows": spans,
        "bars": bars_of(spans),
        "num_handovers": handovers(spans),
        "last_event": events[-1] if events else None,
        "now": snapshot.at,
    }


async def _payload(source: Source, keys: ModelKeys, status: RequestStatus) -> bytes | None:
    """Return the encoded request. It is in its lane until the first claim, then in a key until its end, and in
    another as long as it can be retried."""
    request_id = status.request_id
    key = keys.retry(request_id) if status.state in RETRYABLE_STATES else keys.payload(request_id)
    payload = await source.connection.execute("GET", key)
    if payload is not None or status.state is not RequestState.QUEUED:
        return payload
    entry = await source.connection.execute("HGET", keys.request(request_id), "entry")
    lane = keys.lane(status.band, status.tenant)
    entries = await source.connection.execute("XRANGE", lane, entry, entry) if entry else []
    return next((dict(zip(pairs[::2], pairs[1::2], strict=False)).get(b"request") for _, pairs in entries), None)


async def _read_log(source: Source, broker: Broker, request_id: str) -> Delta | None:
    """Return the output so far, reading only new records of the log."""
    key = (broker.keys.prefix, request_id)
    log = source.logs.pop(key, None) or ReadLog(broker)
    source.logs[key] = log
    if len(source.logs) > MOST_LOGS:
        source.logs.popitem(last=False)
    return await log.read_new(request_id)


def _facts(status: RequestStatus, output: Delta | None, arrived_at: float) -> dict[str, Any]:
    fields = msgspec.structs.asdict(status)
    fields["arrived_at"] = arrived_at or None
    fields["finish_reason"] = output.finish_reason.value if output and output.finish_reason else None
    fields["error"] = f"{output.error.code}: {output.error.message}" if output and output.error else None
    fields["prompt_tokens"] = output.usage.num_prompt_tokens if output and output.usage else None
    fields["cached_tokens"] = output.usage.num_cached_tokens if output and output.usage else None
    stats = output.stats if output else None
    for name in ("queue_time_s", "time_to_first_token_s", "inter_token_latency_s", "latency_s", "num_preemptions"):
        fields[name] = getattr(stats, name) if stats else None
    return fields


def _tail(text: str) -> str:
    return text[-MAX_SHOWN_CHARS:]


async def _retry_request(context: ActionContext) -> str:
    request_id = field_of(context.form, "id")
    await context.source.operations.retry(field_of(context.form, "model"), request_id)
    return f"{request_id} is queued again; it restarts from its prompt"


async def _cancel_request(context: ActionContext) -> str:
    state = await context.source.operations.cancel(field_of(context.form, "model"), field_of(context.form, "id"))
    return "the request is cancelled" if state is RequestState.CANCELLED else f"the request had already ended: {state}"


SECTION = PageSection(
    pages=(Page("request", "/request", "{id} · request", _read_request, query=("model", "id")),),
    actions=(
        Action("/request/cancel", Role.OPERATOR, _cancel_request, "request"),
        Action("/request/retry", Role.OPERATOR, _retry_request, "request"),
    ),
)
