"""What is done to many requests at once: counted first, then in small parts, between which Redis serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from ..errors import ValidationError
from ..queue.request_state import LIVE_STATES, RequestState
from .broker import Broker
from .dead_letter import DeadLetter
from .request_history import MAX_LISTED, RequestFilter, RequestHistory

AT_ONCE = 64


async def count_matching(history: RequestHistory, wanted: RequestFilter) -> int:
    """Return how many requests ``cancel_matching`` would end now, counted up to 10,000.

    Raises:
        ValidationError: ``wanted`` names only states that are ends.
    """
    return len(await history.requests(_live(wanted), limit=MAX_LISTED))


async def cancel_matching(history: RequestHistory, wanted: RequestFilter) -> int:
    """End the requests that a filter takes and that have not ended; returns how many those were.

    What comes while this runs may or may not be ended.

    Raises:
        ValidationError: ``wanted`` names only states that are ends.
    """
    live = _live(wanted)
    return sum([await _cancel_in(part, live) for part in history.parts])


async def _cancel_in(part: RequestHistory, live: RequestFilter) -> int:
    broker, num_cancelled, num_found = Broker(part.connection, part.keys), 0, MAX_LISTED
    while num_found == MAX_LISTED:
        found = await part.requests(live, limit=MAX_LISTED)
        states: list[RequestState | None] = []
        for start in range(0, len(found), AT_ONCE):
            ids = [request.request_id for request in found[start : start + AT_ONCE]]
            states += await asyncio.gather(*map(broker.cancel, ids))
        num_ended = sum(state is RequestState.CANCELLED for state in states)
        num_found, num_cancelled = len(found) if num_ended else 0, num_cancelled + num_ended
    return num_cancelled


async def replay_parked(letter: DeadLetter, request_ids: Iterable[str] | None) -> int:
    """Queue parked requests anew, all when ``request_ids`` is None; returns how many could be."""
    return await _count_done(letter, letter.replay, request_ids)


async def purge_parked(letter: DeadLetter, request_ids: Iterable[str] | None) -> int:
    """Throw parked requests away, all when ``request_ids`` is None; returns how many there were."""
    return await _count_done(letter, letter.purge, request_ids)


async def _count_done(
    letter: DeadLetter, do: Callable[[str], Awaitable[bool]], request_ids: Iterable[str] | None
) -> int:
    wanted = await letter.ids() if request_ids is None else list(request_ids)
    return sum([sum(await asyncio.gather(*map(do, wanted[i : i + AT_ONCE]))) for i in range(0, len(wanted), AT_ONCE)])


def _live(wanted: RequestFilter) -> RequestFilter:
    """The same, of what has not ended."""
    states = tuple(sorted(state.value for state in wanted.wanted & LIVE_STATES))
    if not states:
        raise ValidationError(f"states must name some that have not ended, got {', '.join(wanted.states)}")
    return msgspec.structs.replace(wanted, states=states)
