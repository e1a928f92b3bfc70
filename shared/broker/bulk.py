"""Operations on many requests: count them first, then work in small parts, between which Redis serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from ..errors import ValidationError
from ..queue.lifecycle import LIVE_STATES, RequestState
from .broker import Broker
from .dead_letter import DeadLetter
from .request_history import MAX_LISTED, RequestFilter, RequestHistory

AT_ONCE = 64


async def count_matching(history: RequestHistory, selection: RequestFilter) -> int:
    """Return how many requests ``cancel_matching`` would end now, counted up to 10,000.

    Raises:
        ValidationError: ``selection`` names only ended states.
    """
    return len(await history.requests(_live(selection), limit=MAX_LISTED))


async def cancel_matching(history: RequestHistory, selection: RequestFilter) -> int:
    """End the live requests that a filter selects. Return how many.

    Requests that arrive meanwhile may or may not be ended.

    Raises:
        ValidationError: ``selection`` names only ended states.
    """
    live = _live(selection)
    return sum([await _cancel_in(part, live) for part in history.parts])


async def _cancel_in(part: RequestHistory, live: RequestFilter) -> int:
    broker, num_cancelled, num_listed = Broker(part.connection, part.keys), 0, MAX_LISTED
    while num_listed == MAX_LISTED:
        requests = await part.requests(live, limit=MAX_LISTED)
        states: list[RequestState | None] = []
        for start in range(0, len(requests), AT_ONCE):
            ids = [request.request_id for request in requests[start : start + AT_ONCE]]
            states += await asyncio.gather(*map(broker.cancel, ids))
        num_ended = sum(state is RequestState.CANCELLED for state in states)
        num_listed, num_cancelled = len(requests) if num_ended else 0, num_cancelled + num_ended
    return num_cancelled


async def replay_parked(letter: DeadLetter, request_ids: Iterable[str] | None) -> int:
    """Queue parked requests again, all when ``request_ids`` is None. Return how many were queued."""
    return await _count_done(letter, letter.replay, request_ids)


async def purge_parked(letter: DeadLetter, request_ids: Iterable[str] | None) -> int:
    """Delete parked requests, all when ``request_ids`` is None. Return how many were deleted."""
    return await _count_done(letter, letter.purge, request_ids)


async def _count_done(
    letter: DeadLetter, do: Callable[[str], Awaitable[bool]], request_ids: Iterable[str] | None
) -> int:
    ids = await letter.ids() if request_ids is None else list(request_ids)
    return sum([sum(await asyncio.gather(*map(do, ids[i : i + AT_ONCE]))) for i in range(0, len(ids), AT_ONCE)])


def _live(selection: RequestFilter) -> RequestFilter:
    """Return the same filter, limited to live requests."""
    states = tuple(sorted(state.value for state in selection.selected & LIVE_STATES))
    if not states:
        raise ValidationError(f"states must include a state that is not an end, got {', '.join(selection.states)}")
    return msgspec.structs.replace(selection, states=states)
