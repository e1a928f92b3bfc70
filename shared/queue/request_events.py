"""What requests live through: one event for each move that a script makes, and what is known of a request from them.

The scripts write an event as lines (``events.lua``); fields are only appended, and carry a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from .request_state import RequestState


class EventKind(StrEnum):
    """What happened. The five ends have the names of their states."""

    QUEUED = "queued"
    REPLAYED = "replayed"
    CLAIMED = "claimed"
    # By its engine, which drains, sleeps or was paused; after the death of its engine; with more of its input there.
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
        """The state that the request has from then on."""
        return RequestState.QUEUED if self in _BACK_IN_LINE else RequestState(self.value)


_BACK_IN_LINE = (EventKind.REPLAYED, EventKind.HANDED_BACK, EventKind.RECLAIMED, EventKind.CONTINUED)


class EventLines(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of an event, in their order; what a move does not say has its default."""

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
    """One move of a request. It holds nothing of prompt or output.

    Args:
        event_id: its place among the events of the model; grows.
        at: Unix time in seconds, by the clock of Redis.
        num_output_tokens: logged so far; where an engine takes over, the tokens that it goes on behind.
        engine_id: who claimed it, or who held it until then.
        epoch: what a claim gave it.
        cause: why: the reason or the error's code of an end, what an engine died of.
        num_attempts: engines so far, of a claim and an end.
        num_prompt_tokens, max_tokens: of an entry into the line, where the first may be an estimate, and of an end.
        waited_s, took_s: of an end: from its arrival to its first claim, and from there on. With streamed input, of
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
        """The state that the request has from then on."""
        return self.kind.state

    @property
    def place(self) -> tuple[int, ...]:
        """Its id as what can be compared."""
        return tuple(int(part) for part in self.event_id.split("-"))


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a list tells of one request, also after its result has expired.

    Args:
        at: Unix time in seconds of its last move that is known; of what waits, of its arrival.
        arrived_at, started_at, ended_at: Unix times in seconds; None where not known, or not yet.
        engine_id: who runs it, or ran it last.
        cause: why it ended.
        num_prompt_tokens: an estimate until its end, where the prompt is text.
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
    """Return an event as the scripts wrote it; None of what is none, or is of a kind that a newer version writes."""
    words = zip(EventLines.__struct_fields__, lines.decode(errors="replace").split("\n"), strict=False)
    try:
        told = msgspec.convert({name: word for name, word in words if word}, EventLines, strict=False)
        at_ms = int(event_id.partition("-")[0])
    except (msgspec.ValidationError, ValueError):
        return None
    return RequestEvent(
        event_id=event_id,
        at=at_ms / 1000,
        request_id=request_id,
        tenant=tenant,
        band=band,
        kind=told.kind,
        num_output_tokens=told.num_output_tokens,
        engine_id=told.engine_id,
        epoch=told.epoch,
        cause=told.cause,
        num_attempts=told.num_attempts,
        num_prompt_tokens=told.num_prompt_tokens,
        max_tokens=told.max_tokens,
        waited_s=told.waited_ms / 1000,
        took_s=told.took_ms / 1000,
    )


def decode_entry(entry: Sequence[Any]) -> RequestEvent | None:
    """Return the event of an entry of the model's stream; None of what is none."""
    event_id, flat = entry
    parts = flat[1].split(b"\n", 3)
    if len(flat) != 2 or len(parts) != 4:
        return None
    request_id, tenant, band = (part.decode(errors="replace") for part in parts[:3])
    return decode_event(event_id.decode(), parts[3], request_id=request_id, tenant=tenant, band=band)


def summary_of(event: RequestEvent) -> RequestSummary:
    """Return what the last event of a request tells of it."""
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
