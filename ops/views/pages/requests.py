"""Lists of requests by state, tenant, band, engine, id and time, and an action to cancel many."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from typing import Any

import msgspec

from ....producer.control.secret_keys import Role
from ....shared.broker import STATE_WORDS, RequestFilter
from ....shared.broker.bulk import count_matching, within
from ....shared.broker.request_history import MAX_LISTED
from ....shared.errors import ValidationError
from ....shared.queue.lifecycle import LIVE_STATES, RETRYABLE_STATES, RequestState, RequestSummary
from ....shared.queue.stats import RequestStatus
from ...words import parse_span, requests_in_words
from ..access import Access
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of
from ..source import PageSnapshot, together

# Per state, for running and waiting requests; twice as many of ended ones.
MOST_SHOWN = 50
# A list with a filter may have to scan all events or a long lane.
FILTERED_CACHED_S = 15.0
# Query parameters that make a filter.
NAMES = ("state", "tenant", "band", "engine", "prefix", "since", "until")
# States that a list shows by default.
LIVE = ("running", "waiting")
STATES = STATE_WORDS


async def _read_requests(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    models = list(await snapshot.models())
    model = (await snapshot.check_model(params["model"])).model if params.get("model") else next(iter(models), "")
    if not model:
        return {"model": "", "models": [], "rows": [], "facts": {}}
    matching = await _matching(snapshot, model, params)
    queue = await snapshot.queue(model)
    waiting = [request.request_id for request in matching if request.state is RequestState.QUEUED]
    statuses = await together(
        *(
            snapshot.once(("status", model, request_id), lambda request_id=request_id: queue.status(request_id))
            for request_id in waiting
        )
    )
    places = {status.request_id: status for status in statuses if status is not None}
    stats = await snapshot.stats(model)
    return {
        "model": model,
        "models": models,
        "states": STATES,
        "rows": [_request_row(model, request, places.get(request.request_id), snapshot.at) for request in matching],
        "is_filtered": has_filter(params),
        "can_retry": bool(filter_of(params).selected & RETRYABLE_STATES),
        "can_cancel": has_filter(params) and bool(filter_of(params).selected & LIVE_STATES),
        "words": describe_filter(params),
        "num_running": stats and stats.num_running,
        "num_waiting": stats and stats.depth,
        "counts": {
            "running": stats and stats.num_running,
            "waiting": stats and stats.depth,
            "parked": await snapshot.num_dead(model),
        },
        "most": MOST_SHOWN,
        "facts": {"running": stats and stats.num_running, "waiting": stats and stats.depth},
    }


async def _matching(snapshot: PageSnapshot, model: str, params: Params) -> list[RequestSummary]:
    request_filter = filter_of(params)

    async def read_matching() -> list[RequestSummary]:
        history = await snapshot.source.history(model)
        if request_filter.states != LIVE:
            return await history.requests(request_filter, limit=2 * MOST_SHOWN)
        parts = [msgspec.structs.replace(request_filter, states=(state,)) for state in LIVE]
        both = await together(*(history.requests(part, limit=MOST_SHOWN) for part in parts))
        return [request for requests in both for request in requests]

    if not has_filter(params):
        return await snapshot.once(("live", model), read_matching)
    key = ("requests", model, *(params.get(name, "") for name in NAMES))
    return await snapshot.source.cached(key, FILTERED_CACHED_S, read_matching)


def _request_row(model: str, request: RequestSummary, place: RequestStatus | None, now: float) -> dict[str, Any]:
    return {
        "request": request.request_id,
        "model": model,
        "state": request.state.value,
        "tenant": request.tenant,
        "band": request.band,
        "engine": request.engine_id,
        "moved_at": request.at,
        "position": place and place.position,
        "estimated_start_s": place and place.estimated_start_s,
        "waited_s": _between(request.arrived_at, request.started_at or request.ended_at or now),
        "took_s": _between(request.started_at, request.ended_at or now),
        "output_tokens": request.num_output_tokens,
        "attempts": request.num_attempts,
        "cause": request.cause,
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


async def _read_cancel(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    return await _preview(snapshot, params, LIVE_STATES)


async def _read_retry(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    return await _preview(snapshot, params, RETRYABLE_STATES)


async def _preview(snapshot: PageSnapshot, params: Params, states: Set[RequestState]) -> View:
    """Return how many requests in these states the filter selects, and the first of them."""
    model, request_filter = await _require_filter(snapshot, params)
    history = await snapshot.source.history(model)
    count = await count_matching(history, request_filter, states)
    first = await history.requests(within(request_filter, states), limit=MOST_SHOWN)
    return {
        "model": model,
        "rows": [_request_row(model, request, None, snapshot.at) for request in first],
        "count": count,
        "is_more": count == MAX_LISTED,
        "words": describe_filter(params),
        "names": NAMES,
        "facts": {"count": count},
    }


async def _require_filter(snapshot: PageSnapshot, params: Params) -> tuple[str, RequestFilter]:
    model = (await snapshot.check_model(field_of(params, "model"))).model
    if not has_filter(params):
        raise ValidationError(f"the filter is empty; set one of {', '.join(NAMES)}")
    return model, filter_of(params)


async def _cancel_requests(context: ActionContext) -> str:
    model, request_filter = await _require_filter(PageSnapshot(context.source), context.form)
    count = await context.source.operations.cancel_matching(model, request_filter)
    return f"cancelled {requests_in_words(count)}: {describe_filter(context.form)}"


async def _retry_requests(context: ActionContext) -> str:
    model, request_filter = await _require_filter(PageSnapshot(context.source), context.form)
    count = await context.source.operations.retry_matching(model, request_filter)
    words = f"{requests_in_words(count)} again: {describe_filter(context.form)}"
    return f"queued {words}; the input of others is not stored"


def filter_of(params: Mapping[str, str]) -> RequestFilter:
    """Return the filter of a query or a form.

    Raises:
        ValidationError: ``state`` is unknown, or ``since`` or ``until`` is not a time.
    """
    return RequestFilter(
        states=(params["state"],) if params.get("state") else LIVE,
        tenant=params.get("tenant", ""),
        band=params.get("band", ""),
        engine_id=params.get("engine", ""),
        id_prefix=params.get("prefix", ""),
        **parse_span(params, time.time()),
    )


def has_filter(params: Mapping[str, str]) -> bool:
    """Return whether a query restricts the list of running and waiting requests."""
    return any(params.get(name) for name in NAMES)


def describe_filter(params: Mapping[str, str]) -> str:
    """Return a filter in words: "running, tenant acme, since 15m"."""
    parts = [params.get("state") or "running or waiting"]
    parts += [f"{name} {params[name]}" for name in NAMES[1:] if params.get(name)]
    return ", ".join(parts)


SECTION = PageSection(
    pages=(
        Page("requests", "/requests", "Requests · {model}", _read_requests, query=("model", *NAMES), nav="Requests"),
        Page(
            "cancel",
            "/requests/cancel",
            "Cancel requests · {model}",
            _read_cancel,
            query=("model", *NAMES),
            live=False,
            role=Role.OPERATOR,
        ),
        Page(
            "retry",
            "/requests/retry",
            "Retry requests · {model}",
            _read_retry,
            query=("model", *NAMES),
            live=False,
            role=Role.OPERATOR,
        ),
    ),
    actions=(
        Action("/requests/cancel", Role.OPERATOR, _cancel_requests, "requests", confirm="count"),
        Action("/requests/retry", Role.OPERATOR, _retry_requests, "requests", confirm="count"),
    ),
)
