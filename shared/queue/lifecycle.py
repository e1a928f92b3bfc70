"""The states of a request, the moves between them, and the event of each move.

The table of moves is the only one, for the scripts, the tests and the drawing. The scripts write an event for each move
as lines (``events.lua``); new fields are only appended, and have a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec


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
# Ends after which a request can be queued again. A parked one is replayed from the dead letter.
RETRYABLE_STATES = frozenset({RequestState.FAILED, RequestState.CANCELLED, RequestState.EXPIRED})


def moves_as_lua() -> str:
    """Return the table as Lua: ``MOVES[from][to]`` is true for an allowed move; an end has an empty row."""
    rows = (
        f"{state} = {{{', '.join(f'{to} = true' for to in MOVES.get(state, ()))}}}"  # names are Lua's as well
        for state in RequestState
    )
    return f"local MOVES = {{{', '.join(rows)}}}\n"


class EventKind(StrEnum):
    """Kind of event. The five ends have the names of their states."""

    QUEUED = "queued"
    REPLAYED = "replayed"
    CLAIMED = "claimed"
    # Released by its engine, which drains, sleeps or was paused; after the death of its engine; or for more input.
    HANDED_BACK = "handed_back"
    RECLAIMED = "reclaimed"
    CONTINUED = "continued"
    AWAITING_INPUT = "awaiting_input"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PARKED = "parked"

    @property
    def state(self) -> RequestState:
        """State of the request after the event."""
        return RequestState.QUEUED if self in _BACK_IN_LINE else RequestState(self.value)


_BACK_IN_LINE = (EventKind.REPLAYED, EventKind.HANDED_BACK, EventKind.RECLAIMED, EventKind.CONTINUED)


# Cause of the first event of a request for a model that sleeps, as lanes.lua writes it.
WAITING_FOR_WAKE = "waiting_for_wake"


class EventLines(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of an event, in order; a line that a move does not write has its default."""

    version: int = 1
    kind: EventKind
    num_output_tokens: int = 0
    engine_id: str = ""
    epoch: int = 0
    cause: str = ""
    num_attempts: int = 0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    waited_ms: int = 0
    took_ms: int = 0


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A move of a request, without its prompt or output.

    Args:
        event_id: id among the events of the model, increasing.
        at: Unix time in seconds, by the clock of Redis.
        num_output_tokens: tokens logged so far; a new engine continues after them.
        engine_id: engine that claimed it, or held it until then.
        epoch: epoch of a claim.
        cause: reason or error code of an end, the cause of an engine's death, or why an engine returned the request;
            for an enqueue ``WAITING_FOR_WAKE`` if the model slept.
        num_attempts: engines so far, for a claim and an end.
        num_prompt_tokens, max_tokens: for an enqueue, where the first may be an estimate, and an end.
        waited_s, took_s: for an end: from its arrival to its first claim, and since then. With streamed input, for
            the last segment.
    """

    event_id: str
    at: float
    request_id: str
    tenant: str
    band: str
    kind: EventKind
    num_output_tokens: int = 0
    engine_id: str = ""
    epoch: int = 0
    cause: str = ""
    num_attempts: int = 0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    waited_s: float = 0.0
    took_s: float = 0.0

    @property
    def state(self) -> RequestState:
        """State of the request after the event."""
        return self.kind.state

    @property
    def place(self) -> tuple[int, ...]:
        """Its id in a form that can be compared."""
        return tuple(int(part) for part in self.event_id.split("-"))


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a request in a list, also after its result has expired.

    Args:
        at: Unix time in seconds of its last known move; of its arrival, while it waits.
        arrived_at, started_at, ended_at: Unix times in seconds; None if unknown, or not yet.
        engine_id: engine that runs it, or ran it last.
        cause: reason of its end.
        num_prompt_tokens: an estimate until its end, if the prompt is text.
    """

    request_id: str
    state: RequestState
    tenant: str
    band: str
    at: float
    arrived_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    engine_id: str = ""
    cause: str = ""
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    num_attempts: int = 0


def decode_event(
    event_id: str, lines: bytes, *, request_id: str, tenant: str = "", band: str = ""
) -> RequestEvent | None:
    """Return an event of the scripts; None if it cannot be read, or is of a kind of a newer version."""
    words = zip(EventLines.__struct_fields__, lines.decode(errors="replace").split("\n"), strict=False)
    try:
        parsed = msgspec.convert({name: word for name, word in words if word}, EventLines, strict=False)
        at_ms = int(event_id.partition("-")[0])
    except (msgspec.ValidationError, ValueError):
        return None
    return RequestEvent(
        event_id=event_id,
        at=at_ms / 1000,
        request_id=request_id,
        tenant=tenant,
        band=band,
        kind=parsed.kind,
        num_output_tokens=parsed.num_output_tokens,
        engine_id=parsed.engine_id,
        epoch=parsed.epoch,
        cause=parsed.cause,
        num_attempts=parsed.num_attempts,
        num_prompt_tokens=parsed.num_prompt_tokens,
        max_tokens=parsed.max_tokens,
        waited_s=parsed.waited_ms / 1000,
        took_s=parsed.took_ms / 1000,
    )


def decode_entry(entry: Sequence[Any]) -> RequestEvent | None:
    """Return the event of an entry of the model's stream; None if it has none."""
    event_id, flat = entry
    parts = flat[1].split(b"\n", 3)
    if len(flat) != 2 or len(parts) != 4:
        return None
    request_id, tenant, band = (part.decode(errors="replace") for part in parts[:3])
    return decode_event(event_id.decode(), parts[3], request_id=request_id, tenant=tenant, band=band)


def summary_of(event: RequestEvent) -> RequestSummary:
    """Return the summary of a request from its last event."""
    is_end = event.state.is_end
    started_at = event.at - event.took_s if event.num_attempts else None
    arrived_at = event.at - event.took_s - event.waited_s
    return RequestSummary(
        request_id=event.request_id,
        state=event.state,
        tenant=event.tenant,
        band=event.band,
        at=event.at,
        arrived_at=arrived_at if is_end or event.kind is EventKind.QUEUED else None,
        started_at=started_at if is_end else None,
        ended_at=event.at if is_end else None,
        engine_id=event.engine_id,
        cause=event.cause,
        num_output_tokens=event.num_output_tokens,
        num_prompt_tokens=event.num_prompt_tokens,
        max_tokens=event.max_tokens,
        num_attempts=event.num_attempts,
    )
