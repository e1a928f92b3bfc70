"""Converts the pieces of a generation to the response and its events.

Each output item in progress creates the events that open, extend and close it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..answers.pieces import CallStart, Piece
from .items import Item, ItemStatus
from .objects import (
    Event,
    IncompleteDetails,
    OutputTextDelta,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    ResponseUsage,
    Status,
)
from .offered_tools import OfferedTool
from .open_items import DeltaEvent, OpenItem, open_item

# OpenAI has no event for a cancelled response; the status shows it.
_END_EVENTS: dict[Status, type[ResponseCompleted] | type[ResponseIncomplete] | type[ResponseFailed]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseIncomplete,
}


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a response."""

    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    completed_at: int | None = None


class ResponseWriter:
    """Writes one response. Each method returns the resulting events.

    Args:
        response: the fields of the request, with status "queued" and without output. **Mutated.**
        tools: tools that the model may call, by the names of their functions.
        after: number of the last event that the reader has; events up to it are omitted.
    """

    def __init__(self, response: Response, tools: Mapping[str, OfferedTool] | None = None, *, after: int = -1) -> None:
        self._response = response
        self._tools = tools or {}
        self._after = after
        self._last_number = -1
        self._done: list[Item] = []
        self._open: OpenItem | None = None

    @property
    def response(self) -> Response:
        """The response in its current state."""
        output = self._done if self._open is None else [*self._done, self._open.item("in_progress")]
        return msgspec.structs.replace(self._response, output=list(output))

    def create(self) -> list[Event]:
        """Record that the request is queued. A foreground response is reported as in progress."""
        if self._response.background:
            return self._number([ResponseCreated(response=self.response), ResponseQueued(response=self.response)])
        self._response.status = "in_progress"
        return self._number([ResponseCreated(response=self.response), ResponseInProgress(response=self.response)])

    def start(self) -> list[Event]:
        """Record that an engine has started. Has no effect the second time."""
        if self._response.status != "queued":
            return []
        self._response.status = "in_progress"
        return self._number([ResponseInProgress(response=self.response)])

    def write(self, pieces: Iterable[Piece]) -> list[Event]:
        """Add generated pieces."""
        events: list[Event] = []
        for piece in pieces:
            starts_call = isinstance(piece, CallStart)
            if not starts_call and not piece.text:
                continue
            if self._open is None or not isinstance(piece, self._open.continued_by):
                events += self._close("completed")
                self._open = open_item(piece, self._response.id, len(self._done), self._tools)
                events += self._number(self._open.opening())
            if not starts_call and (delta := self._open.extend(piece)) is not None:
                events += self._number_delta(delta)
        return events

    def end(self, ending: Ending) -> list[Event]:
        """End the response. An open item is closed with its text so far."""
        events = self._close("completed" if ending.status == "completed" else "incomplete")
        response = self._response
        response.status, response.error, response.usage = ending.status, ending.error, ending.usage
        response.incomplete_details, response.completed_at = ending.incomplete_details, ending.completed_at
        return events + self._number([_END_EVENTS[ending.status](response=self.response)])

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        rest = self._open.held_delta()
        closing = [] if rest is None else self._number_delta(rest)
        closing += self._number(self._open.closing(status))
        self._done.append(self._open.item(status))
        self._open = None
        return closing

    def _number(self, events: list[Event]) -> list[Event]:
        for event in events:
            self._last_number += 1
            event.sequence_number = self._last_number
        return [event for event in events if event.sequence_number > self._after]

    def _number_delta(self, event: DeltaEvent) -> list[Event]:
        num_skipped = max(0, self._after - self._last_number)
        self._last_number += len(event.delta)
        event.sequence_number = self._last_number
        if num_skipped:
            event.delta = event.delta[num_skipped:]
            if isinstance(event, OutputTextDelta):
                event.logprobs = _skip_chars(event.logprobs, num_skipped)
        return [event] if event.delta else []


def _skip_chars(logprobs: list[Any], num_chars: int) -> list[Any]:
    """Return the log probabilities without the tokens within the first ``num_chars`` characters."""
    for i, token in enumerate(logprobs):
        num_chars -= len(token.token)
        if num_chars < 0:
            return logprobs[i:]
    return []
