"""Operations on many requests: count them first, then work in small parts, between which Redis serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Set

import msgspec

from ..errors import ValidationError
from ..queue.lifecycle import LIVE_STATES, RETRYABLE_STATES, RequestState
from .broker import Broker
from .dead_letter import DeadLetter
from .request_history import MAX_LISTED, RequestFilter, RequestHistory

AT_ONCE = 64


async def count_matching(
    history: RequestHistory, selection: RequestFilter, states: Set[RequestState] = LIVE_STATES
) -> int:
    """Return how many requests ``cancel_matching`` would end now, counted up to 10,000.

    Args:
        states: ``RETRYABLE_STATES`` counts those that ``retry_matching`` would try to queue.

    Raises:
        ValidationError: ``selection`` names none of ``states``.
    """
    return len(await history.requests(within(selection, states), limit=MAX_LISTED))


async def cancel_matching(history: RequestHistory, selection: RequestFilter) -> int:
    """End the live requests that a filter selects. Return how many.

    Requests that arrive meanwhile may or may not be ended.

    Raises:
        ValidationError: ``selection`` is empty, or names only ended states.
    """
    _check_not_empty(selection)

    async def cancel(broker: Broker, request_id: str) -> bool:
        return await broker.cancel(request_id) is RequestState.CANCELLED

    return await _change_each(history, within(selection, LIVE_STATES), cancel)


async def retry_matching(history: RequestHistory, selection: RequestFilter, now: float) -> int:
    """Queue the failed, cancelled and expired requests that a filter selects again. Return how many.

    Requests whose input is not retained stay as they are.

    Args:
        now: Unix time; later ends are left out, so that a request which fails again at once is retried once.

    Raises:
        ValidationError: ``selection`` is empty, or names no such state.
    """
    _check_not_empty(selection)
    ended = within(selection, RETRYABLE_STATES)
    ended = msgspec.structs.replace(ended, until=min(ended.until or now, now))
    # The list has the newest first. The oldest is to be queued first.
    return await _change_each(history, ended, Broker.retry, is_reversed=True)


def _check_not_empty(selection: RequestFilter) -> None:
    # A filter whose fields were forgotten must not change every request of a model.
    if selection == RequestFilter():
        raise ValidationError(f"the filter is empty; set one of {', '.join(RequestFilter.__struct_fields__)}")


async def _change_each(
    history: RequestHistory,
    selection: RequestFilter,
    change: Callable[[Broker, str], Awaitable[bool]],
    *,
    is_reversed: bool = False,
) -> int:
    """Call ``change`` with all requests that a filter selects, in the order of the list, and count those changed."""
    return sum([await _change_in(part, selection, change, is_reversed=is_reversed) for part in history.parts])


async def _change_in(
    part: RequestHistory,
    selection: RequestFilter,
    change: Callable[[Broker, str], Awaitable[bool]],
    *,
    is_reversed: bool,
) -> int:
    broker, num_changed, num_listed = Broker(part.connection, part.keys), 0, MAX_LISTED
    while num_listed == MAX_LISTED:
        requests = await part.requests(selection, limit=MAX_LISTED)
        if is_reversed:
            requests.reverse()
        changed: list[bool] = []
        for start in range(0, len(requests), AT_ONCE):
            ids = [request.request_id for request in requests[start : start + AT_ONCE]]
            changed += await asyncio.gather(*(change(broker, request_id) for request_id in ids))
        num_listed, num_changed = len(requests) if any(changed) else 0, num_changed + sum(changed)
    return num_changed


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


def within(selection: RequestFilter, states: Set[RequestState]) -> RequestFilter:
    """Return the same filter, limited to some states.

    Raises:
        ValidationError: it selects none of them.
    """
    names = tuple(sorted(state.value for state in selection.selected & states))
    if not names:
        raise ValidationError(f"states must include {' or '.join(sorted(states))}, got {', '.join(selection.states)}")
    return msgspec.structs.replace(selection, states=names)
