"""One request: where it stands, what it asks for, and its tokens as they come."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.operator_keys import Role
from ....shared.broker import Broker
from ....shared.errors import RequestNotFoundError
from ....shared.keys import ModelKeys
from ....shared.messages import Delta
from ....shared.queue_stats import RequestStatus
from ....shared.request_state import RequestState
from ..access import Access
from ..asked import decode_asked
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..read_log import MAX_SHOWN_CHARS, ReadLog
from ..source import Moment, Source, together

MOST_LOGS = 100


async def _read(moment: Moment, params: Params, access: Access) -> View:
    source = moment.source
    model, request_id = (await moment.check_model(field_of(params, "model"))).model, field_of(params, "id")
    broker = await moment.once(("broker", model, request_id), lambda: source.broker_of(model, request_id))
    keys = broker.keys
    status, arrived_ms = await together(
        (await moment.queue(model)).status(request_id),
        source.connection.execute("HGET", keys.request(request_id), "arrived_at"),
    )
    if status is None:
        raise RequestNotFoundError(f"request {request_id!r} of {model} is unknown, or its result has expired")
    payload = await _payload(source, keys, status)
    said = await _log_of(source, broker, request_id)
    row = _row(status, said, int(arrived_ms or 0) / 1000)
    return {
        "model": model,
        "request_id": request_id,
        "status": status,
        "row": row,
        "rows": [row],
        "said": said,
        "text": _tail(said.text) if said and access.sees_contents else "",
        "is_cut": said is not None and len(said.text) > MAX_SHOWN_CHARS,
        "asked": decode_asked(payload, access) if payload else None,
        "facts": {**row, "text": said.text if said and access.sees_contents else None},
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


def _row(status: RequestStatus, said: Delta | None, arrived_at: float) -> dict[str, Any]:
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
