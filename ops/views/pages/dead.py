"""Parked requests, grouped by input and cause, with actions to replay or purge them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ....producer.control.secret_keys import Role
from ....shared.deployment.records import DeadRequest
from ....shared.errors import RequestNotFoundError, ValidationError
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..request import RequestInput, decode_request_input
from ..source import PageSnapshot, Source

# The newest are listed; the count covers all.
MOST_SHOWN = 200
MAX_PER_ACTION = 1000


async def _read_parked(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    models = await snapshot.models()
    selected = [(await snapshot.check_model(params["model"])).model] if params.get("model") else list(models)
    groups: list[View] = []
    for model in selected:
        groups += _grouped(model, await _parked(snapshot, model))
    groups.sort(key=lambda group: -group["newest_at"])
    rows = [row for group in groups for row in group["requests"]]
    counts = [await snapshot.num_dead(model) for model in selected]
    return {
        "groups": groups,
        "rows": rows,
        "num_parked": sum(counts),
        "most": MOST_SHOWN,
        "facts": {"parked": sum(counts)},
    }


async def _parked(snapshot: PageSnapshot, model: str) -> list[DeadRequest]:
    """Return the newest parked requests. Known ones are not read again, since a parked request does not change."""
    source = snapshot.source
    letter, cached = await source.dead(model), source.parked.setdefault(model, {})
    newest = await letter.newest(MOST_SHOWN)
    missing = [key for key in newest if key not in cached]
    requests = await asyncio.gather(*(letter.show(request_id) for request_id, _ in missing))
    cached.update({key: request for key, request in zip(missing, requests, strict=True) if request is not None})
    for key in cached.keys() - set(newest):
        del cached[key]
    return [cached[key] for key in newest if key in cached]


def _grouped(model: str, parked: list[DeadRequest]) -> list[View]:
    """Group requests by input and cause, since these share one problem."""
    groups: dict[tuple[str, str], View] = {}
    for request in parked:
        cause = request.cause.reason if request.cause else "the cause is unreadable"
        group = groups.setdefault(
            (request.input_hash, cause.splitlines()[0] if cause else ""),
            {"model": model, "input_hash": request.input_hash, "cause": cause, "newest_at": 0.0, "requests": []},
        )
        group["newest_at"] = max(group["newest_at"], request.parked_at)
        group["requests"].append(_parked_row(model, request, cause))
    return list(groups.values())


def _parked_row(model: str, request: DeadRequest, cause: str) -> dict[str, Any]:
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


async def _read_one(snapshot: PageSnapshot, params: Params, access: Access) -> View:
    model, request_id = (await snapshot.check_model(field_of(params, "model"))).model, field_of(params, "id")
    parked = await (await snapshot.source.dead(model)).show(request_id)
    if parked is None:
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked; it may have been replayed")
    asked: RequestInput | None = decode_request_input(parked.payload, access) if parked.is_request else None
    cause = parked.cause.reason if parked.cause else "the cause is unreadable"
    row = _parked_row(model, parked, cause)
    return {
        "model": model,
        "row": row,
        "rows": [row],
        "trace": parked.cause.trace if parked.cause else "",
        "last_step": parked.cause.last_step if parked.cause else None,
        "asked": asked,
        "facts": {**row, "asked": asked and msgspec.to_builtins(asked)},
    }


async def _replay_one(context: ActionContext) -> str:
    model, request_id = field_of(context.form, "model"), field_of(context.form, "id")
    parked = await (await context.source.dead(model)).show(request_id)
    if parked is not None and not parked.is_request:
        raise ValidationError(f"{request_id!r} is an entry of a foreign writer, not a request; purge it")
    if not await context.source.operations.replay_dead(model, request_id):
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked")
    return f"{request_id} is queued again; it restarts from its prompt"


async def _purge_one(context: ActionContext) -> str:
    model, request_id = field_of(context.form, "model"), field_of(context.form, "id")
    if not await context.source.operations.purge_dead(model, request_id):
        raise RequestNotFoundError(f"no request {request_id!r} of {model} is parked")
    return f"{request_id} is purged"


async def _with_input(source: Source, model: str, input_hash: str) -> list[DeadRequest]:
    letter = await source.dead(model)
    requests = [await letter.show(request_id) for request_id, _ in await letter.newest(MAX_PER_ACTION)]
    return [
        request
        for request in requests
        if request is not None and request.input_hash == input_hash and request.is_request
    ]


async def _change_with_input(context: ActionContext, change: Callable[[str, str], Awaitable[bool]]) -> int:
    """Change all parked requests with one input, and return how many were changed."""
    model, input_hash = field_of(context.form, "model"), field_of(context.form, "hash")
    return sum(
        [await change(model, request.request_id) for request in await _with_input(context.source, model, input_hash)]
    )


async def _replay_input(context: ActionContext) -> str:
    num = await _change_with_input(context, context.source.operations.replay_dead)
    return f"{num} requests with this input are queued again"


async def _purge_input(context: ActionContext) -> str:
    num = await _change_with_input(context, context.source.operations.purge_dead)
    return f"{num} requests with this input are purged"


SECTION = PageSection(
    pages=(
        Page("dead", "/dead", "Dead letter", _read_parked, query=("model",), nav="Dead letter"),
        Page("parked", "/parked", "{id} · parked", _read_one, query=("model", "id"), live=False),
    ),
    actions=(
        Action("/dead/replay", Role.OPERATOR, _replay_one, "dead"),
        Action("/dead/purge", Role.ADMIN, _purge_one, "dead", confirm="id"),
        Action("/dead/replay-input", Role.OPERATOR, _replay_input, "dead"),
        Action("/dead/purge-input", Role.ADMIN, _purge_input, "dead", confirm="model"),
    ),
)
