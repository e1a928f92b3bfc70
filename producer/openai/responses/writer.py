"""From the pieces of a generation to the response and its events.

Invariant: an event's ``sequence_number`` follows from what was generated before its end, and from nothing else. Every
event but a delta takes the next number; a delta takes one for each character, and carries the last of them. So it does
not matter how a generation was cut on its way (records of the log, merged for a slow reader, cut anew after a failure):
at the same character stands the same number, and a reader who has everything up to number N is given what comes after
it, to the character. Numbers rise; they are not consecutive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from .events import (
    Event,
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from .items import Item, ItemStatus
from .objects import IncompleteDetails, Response, ResponseError, ResponseUsage, Status
from .open_items import Delta, OpenItem, open_item
from .pieces import CallStart, Piece


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ends."""

    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None


# OpenAI has no event for a cancelled response: its status says so.
_END_EVENTS: dict[Status, type[ResponseCompleted] | type[ResponseIncomplete] | type[ResponseFailed]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseIncomplete,
}


class ResponseWriter:
    """Writes one response; each method returns the events that tell what it did.

    Args:
        response: what the request said, with status "queued" and no output yet. **Mutated.**
        after: number of the last event that the reader has; nothing up to it is returned.
    """

    def __init__(self, response: Response, *, after: int = -1) -> None:
        self._response = response
        self._after = after
        self._last_number = -1
        self._done: list[Item] = []
        self._open: OpenItem | None = None

    @property
    def response(self) -> Response:
        """The response as it stands."""
        output = self._done if self._open is None else [*self._done, self._open.item("in_progress")]
        return msgspec.structs.replace(self._response, output=list(output))

    def create(self) -> list[Event]:
        """It has been put in line; who waits for it in the foreground is told that it is in progress."""
        if self._response.background:
            return self._number([ResponseCreated(response=self.response), ResponseQueued(response=self.response)])
        self._response.status = "in_progress"
        return self._number([ResponseCreated(response=self.response), ResponseInProgress(response=self.response)])

    def start(self) -> list[Event]:
        """An engine has begun with it; a second time, this does nothing."""
        if self._response.status != "queued":
            return []
        self._response.status = "in_progress"
        return self._number([ResponseInProgress(response=self.response)])

    def write(self, pieces: Iterable[Piece]) -> list[Event]:
        """More has been generated."""
        events: list[Event] = []
        for piece in pieces:
            begins_call = isinstance(piece, CallStart)
            if not begins_call and not piece.text:
                continue
            if self._open is None or not self._open.continues_with(piece):
                events += self._close("completed")
                self._open = open_item(piece, self._response.id, len(self._done))
                events += self._number(self._open.opening())
            if not begins_call:
                events += self._number_delta(self._open.lengthen(piece))
        return events

    def end(self, ending: Ending) -> list[Event]:
        """It is over; what was being written stays as far as it came."""
        events = self._close("completed" if ending.status == "completed" else "incomplete")
        response = self._response
        response.status, response.error, response.usage = ending.status, ending.error, ending.usage
        response.incomplete_details, response.completed_at = ending.incomplete_details, ending.completed_at
        return events + self._number([_END_EVENTS[ending.status](response=self.response)])

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        closing = self._number(self._open.closing(status))
        self._done.append(self._open.item(status))
        self._open = None
        return closing

    def _number(self, events: list[Event]) -> list[Event]:
        for event in events:
            self._last_number += 1
            event.sequence_number = self._last_number
        return [event for event in events if event.sequence_number > self._after]

    def _number_delta(self, event: Delta) -> list[Event]:
        num_known = max(0, self._after - self._last_number)
        self._last_number += len(event.delta)
        event.sequence_number = self._last_number
        if num_known:
            event.delta = event.delta[num_known:]
            if isinstance(event, OutputTextDelta):
                event.logprobs = _from_char(event.logprobs, num_known)
        return [event] if event.delta else []


def _from_char(logprobs: list[Any], num_chars: int) -> list[Any]:
    """Leave out the tokens that lie within the first characters."""
    for i, token in enumerate(logprobs):
        num_chars -= len(token.token)
        if num_chars < 0:
            return logprobs[i:]
    return []
