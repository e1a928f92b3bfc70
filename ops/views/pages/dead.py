"""Parked requests, those of one input and cause together: what they died of, and another try or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ....producer.operator_keys import Role
from ....shared.deployment.records import DeadRequest
from ....shared.errors import RequestNotFoundError, ValidationError
from ..access import Access
from ..asked import Asked, decode_asked
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..source import Moment, Source

# The newest ones; the count tells of all.
MOST_SHOWN = 200
MOST_AT_ONCE = 1000


async def _read(moment: Moment, params: Params, _: Access) -> View:
    models = await moment.models()
    wanted = [(await moment.check_model(params["model"])).model] if params.get("model") else list(models)
    groups: list[View] = []
    for model in wanted:
        groups += _grouped(model, await _parked(moment, model))
    groups.sort(key=lambda group: -group["newest_at"])
    rows = [row for group in groups for row in group["requests"]]
    counts = [await moment.num_dead(model) for model in wanted]
    return {
        "groups": groups,
        "rows": rows,
        "num_parked": sum(counts),
        "most": MOST_SHOWN,
        "facts": {"parked": sum(counts)},
    }


async def _parked(moment: Moment, model: str) -> list[DeadRequest]:
    """The newest; what was read before is not read again, since a parked request does not change."""
    source = moment.source
    letter, known = await source.dead(model), source.parked.setdefault(model, {})
    newest = await letter.newest(MOST_SHOWN)
    missing = [one for one in newest if one not in known]
    found = await asyncio.gather(*(letter.show(request_id) for request_id, _ in missing))
    known.update({one: request for one, request in zip(missing, found, strict=True) if request is not None})
    for gone in known.keys() - set(newest):
        del known[gone]
    return [known[one] for one in newest if one in known]


def _grouped(model: str, parked: list[DeadRequest]) -> list[View]:
    """Those of one input and one cause are one trouble."""
    groups: dict[tuple[str, str], View] = {}
    for request in parked:
        cause = request.cause.reason if request.cause else "its record cannot be read"
        group = groups.setdefault(
            (request.input_hash, cause.splitlines()[0] if cause else ""),
            {"model": model, "input_hash": request.input_hash, "cause": cause, "newest_at": 0.0, "requests": []},
        )
        group["newest_at"] = max(group["newest_at"], request.parked_at)
        group["requests"].append(_row(model, request, cause))
    return list(groups.values())


def _row(model: str, request: DeadRequest, cause: str) -> dict[str, Any]:
    return {
        "request": request.request_id,
        "model": model,
        "parked_at": request.parked_at,
        "deliveries": request.deliveries,
        "deaths": request.deaths,
        "output_tokens": request.num_output_tokens,
        "engine": request.cause.engine_id if request.cause else "",
        "cause": cause,
        "input_hash": request.input_hash,
        "is_request": request.is_request,
    }


async def _read_one(moment: Moment, params: Params, access: Access) -> View:
    model, request_id = (await moment.check_model(field_of(params, "model"))).model, field_of(params, "id")
    parked = await (await moment.source.dead(model)).show(request_id)
    if parked is None:
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked; it may have been replayed")
    asked: Asked | None = decode_asked(parked.payload, access) if parked.is_request else None
    cause = parked.cause.reason if parked.cause else "its record cannot be read"
    row = _row(model, parked, cause)
    return {
        "model": model,
        "row": row,
        "rows": [row],
        "trace": parked.cause.trace if parked.cause else "",
        "last_step": parked.cause.last_step if parked.cause else None,
        "asked": asked,
        "facts": {**row, "asked": asked and msgspec.to_builtins(asked)},
    }


async def _replay(act: Act) -> str:
    model, request_id = field_of(act.form, "model"), field_of(act.form, "id")
    parked = await (await act.source.dead(model)).show(request_id)
    if parked is not None and not parked.is_request:
        raise ValidationError(f"{request_id!r} is no request but an entry that a stranger wrote; it can be thrown away")
    if not await act.source.operations.replay_dead(model, request_id):
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked")
    return f"{request_id} is queued again, and starts from its prompt"


async def _purge(act: Act) -> str:
    model, request_id = field_of(act.form, "model"), field_of(act.form, "id")
    if not await act.source.operations.purge_dead(model, request_id):
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked")
    return f"{request_id} is thrown away"


async def _of_input(source: Source, model: str, input_hash: str) -> list[DeadRequest]:
    letter = await source.dead(model)
    found = [await letter.show(request_id) for request_id, _ in await letter.newest(MOST_AT_ONCE)]
    return [one for one in found if one is not None and one.input_hash == input_hash and one.is_request]


async def _each_of_input(act: Act, change: Callable[[str, str], Awaitable[bool]]) -> int:
    """Change all parked requests of one input; returns how many."""
    model, input_hash = field_of(act.form, "model"), field_of(act.form, "hash")
    return sum([await change(model, one.request_id) for one in await _of_input(act.source, model, input_hash)])


async def _replay_input(act: Act) -> str:
    num = await _each_of_input(act, act.source.operations.replay_dead)
    return f"{num} requests with this input are queued again"


async def _purge_input(act: Act) -> str:
    num = await _each_of_input(act, act.source.operations.purge_dead)
    return f"{num} requests with this input are thrown away"


ROOM = Room(
    pages=(
        Page("dead", "/dead", "Dead letter", _read, query=("model",), nav="Dead letter"),
        Page("parked", "/parked", "{id} · parked", _read_one, query=("model", "id"), live=False),
    ),
    actions=(
        Action("/dead/replay", Role.OPERATOR, _replay, "dead"),
        Action("/dead/purge", Role.ADMIN, _purge, "dead", confirm="id"),
        Action("/dead/replay-input", Role.OPERATOR, _replay_input, "dead"),
        Action("/dead/purge-input", Role.ADMIN, _purge_input, "dead", confirm="model"),
    ),
)
