"""The states of a request and the moves between them: one table, for the scripts, the tests and the drawing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RequestState(StrEnum):
    """State of a request.

    It waits (``QUEUED``), an engine holds it (``CLAIMED``), or it has answered all the input that it has so far
    (``AWAITING_INPUT``). The other five are ends: ``PARKED`` is the dead letter, from which it can be replayed.
    """

    QUEUED = "queued"
    CLAIMED = "claimed"
    AWAITING_INPUT = "awaiting_input"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PARKED = "parked"

    @property
    def is_end(self) -> bool:
        """Whether it is an end: only a replay may follow, which starts the request anew."""
        return self not in MOVES


_STOPPED = (RequestState.FAILED, RequestState.CANCELLED, RequestState.EXPIRED, RequestState.PARKED)

# The states that may follow each state that is not an end. The scripts refuse every other move (``move`` in lib.lua). A
# request begins as QUEUED: by an enqueue, or by the replay of a parked request, whose record is written anew.
MOVES: Mapping[RequestState, tuple[RequestState, ...]] = {
    RequestState.QUEUED: (RequestState.CLAIMED, *_STOPPED),
    RequestState.CLAIMED: (RequestState.QUEUED, RequestState.AWAITING_INPUT, RequestState.FINISHED, *_STOPPED),
    RequestState.AWAITING_INPUT: (RequestState.QUEUED, RequestState.FINISHED, *_STOPPED),
}

LIVE_STATES = frozenset(MOVES)


def moves_as_lua() -> str:
    """Return the table as Lua: ``MOVES[from][to]`` is true for an allowed move; an end has an empty row."""
    rows = (
        f"{state} = {{{', '.join(f'{to} = true' for to in MOVES.get(state, ()))}}}"  # names are Lua's as well
        for state in RequestState
    )
    return f"local MOVES = {{{', '.join(rows)}}}\n"
