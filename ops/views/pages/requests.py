"""Lists of requests, what runs, waits or has ended, by tenant, band, engine, id and time; and the end of many."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.operator_keys import Role
from ....shared.broker import RequestFilter
from ....shared.broker.bulk import count_matching
from ....shared.broker.request_history import MAX_LISTED
from ....shared.errors import ValidationError
from ....shared.queue.request_events import RequestSummary
from ....shared.queue.request_state import LIVE_STATES, RequestState
from ....shared.queue.stats import RequestStatus
from ..access import Access
from ..filters import LIVE, NAMES, STATES, filter_of, names_some, words_of
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..source import Moment, together

# Of what runs and of what waits; of what has ended twice as many.
MOST_SHOWN = 50
# A list with a filter may take a walk over all events or a long lane.
FILTERED_KEPT_S = 15.0


async def _read(moment: Moment, params: Params, _: Access) -> View:
    models = list(await moment.models())
    model = (await moment.check_model(params["model"])).model if params.get("model") else next(iter(models), "")
    if not model:
        return {"model": "", "models": [], "rows": [], "facts": {}}
    found = await _found(moment, model, params)
    queue = await moment.queue(model)
    waiting = [one.request_id for one in found if one.state is RequestState.QUEUED]
    statuses = await together(
        *(moment.once(("status", model, one), lambda one=one: queue.status(one)) for one in waiting)
    )
    places = {status.request_id: status for status in statuses if status is not None}
    stats = await moment.stats(model)
    return {
        "model": model,
        "models": models,
        "states": STATES,
        "rows": [_row(model, request, places.get(request.request_id)) for request in found],
        "is_filtered": names_some(params),
        "can_cancel": names_some(params) and bool(filter_of(params).selected & LIVE_STATES),
        "words": words_of(params),
        "num_running": stats and stats.num_running,
        "num_waiting": stats and stats.depth,
        "most": MOST_SHOWN,
        "facts": {"running": stats and stats.num_running, "waiting": stats and stats.depth},
    }


async def _found(moment: Moment, model: str, params: Params) -> list[RequestSummary]:
    wanted = filter_of(params)

    async def read() -> list[RequestSummary]:
        history = await moment.source.history(model)
        if wanted.states != LIVE:
            return await history.requests(wanted, limit=2 * MOST_SHOWN)
        parts = [msgspec.structs.replace(wanted, states=(state,)) for state in LIVE]
        both = await together(*(history.requests(part, limit=MOST_SHOWN) for part in parts))
        return [request for requests in both for request in requests]

    if not names_some(params):
        return await moment.once(("live", model), read)
    key = ("requests", model, *(params.get(name, "") for name in NAMES))
    return await moment.source.kept(key, FILTERED_KEPT_S, read)


def _row(model: str, request: RequestSummary, place: RequestStatus | None) -> dict[str, Any]:
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
        "waited_s": _between(request.arrived_at, request.started_at),
        "took_s": _between(request.started_at, request.ended_at),
        "output_tokens": request.num_output_tokens,
        "attempts": request.num_attempts,
        "cause": request.cause,
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


async def _read_cancel(moment: Moment, params: Params, _: Access) -> View:
    """How many a filter would end, and the first of them."""
    model, wanted = await _meant(moment, params)
    history = await moment.source.history(model)
    live = tuple(state.value for state in wanted.selected & LIVE_STATES)
    count = await count_matching(history, wanted)
    first = await history.requests(msgspec.structs.replace(wanted, states=live), limit=MOST_SHOWN)
    return {
        "model": model,
        "rows": [_row(model, request, None) for request in first],
        "count": count,
        "is_more": count == MAX_LISTED,
        "words": words_of(params),
        "names": NAMES,
        "facts": {"count": count},
    }


async def _meant(moment: Moment, params: Params) -> tuple[str, RequestFilter]:
    model = (await moment.check_model(field_of(params, "model"))).model
    if not names_some(params):
        raise ValidationError(f"say which requests: one of {', '.join(NAMES)} must be given")
    return model, filter_of(params)


async def _cancel(act: Act) -> str:
    model, wanted = await _meant(Moment(act.source), act.form)
    count = await act.source.operations.cancel_matching(model, wanted)
    return f"{count} requests are cancelled: {words_of(act.form)}"


ROOM = Room(
    pages=(
        Page("requests", "/requests", "Requests · {model}", _read, query=("model", *NAMES), nav="Requests"),
        Page(
            "cancel",
            "/requests/cancel",
            "Cancel requests · {model}",
            _read_cancel,
            query=("model", *NAMES),
            live=False,
            role=Role.OPERATOR,
        ),
    ),
    actions=(Action("/requests/cancel", Role.OPERATOR, _cancel, "requests", confirm="count"),),
)
