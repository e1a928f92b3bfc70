"""Converts the pieces of a generation to the response and its events.

Each output item in progress creates the events that open, extend and close it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from ..answers.pieces import CallArguments, CallStart, Content, Piece, ReasoningPiece
from .items import FunctionCall, Item, ItemStatus, Message, OutputText, Reasoning, ReasoningText, item_id
from .objects import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    Event,
    IncompleteDetails,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
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

# OpenAI has no event for a cancelled response; the status shows it.
_END_EVENTS: dict[Status, type[ResponseCompleted] | type[ResponseIncomplete] | type[ResponseFailed]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseIncomplete,
}
Delta = OutputTextDelta | ReasoningTextDelta | ArgumentsDelta


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
        after: number of the last event that the reader has; events up to it are omitted.
    """

    def __init__(self, response: Response, *, after: int = -1) -> None:
        self._response = response
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
            if self._open is None or not self._open.continues_with(piece):
                events += self._close("completed")
                self._open = open_item(piece, self._response.id, len(self._done))
                events += self._number(self._open.opening())
            if not starts_call:
                events += self._number_delta(self._open.extend(piece))
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


class OpenItem(Protocol):
    """An item that is being written; ``place`` is its output_index."""

    def continues_with(self, piece: Piece) -> bool:
        """Return whether a piece belongs to the item."""
        ...

    def opening(self) -> list[Event]: ...

    def extend(self, piece: Any) -> Delta:
        """Add a piece that belongs to the item."""
        ...

    def closing(self, status: ItemStatus) -> list[Event]: ...

    def item(self, status: ItemStatus) -> Item:
        """Return the item in its current state."""
        ...


class OpenMessage:
    """A message in progress."""

    def __init__(self, response_id: str, place: int) -> None:
        self._id = item_id(Message, response_id, place)
        self._place = place
        self._text = ""
        self._logprobs: list[Any] = []

    def continues_with(self, piece: Piece) -> bool:
        return isinstance(piece, Content)

    def opening(self) -> list[Event]:
        message = Message(id=self._id, role="assistant", status="in_progress", content=[])
        return [
            OutputItemAdded(output_index=self._place, item=message),
            ContentPartAdded(item_id=self._id, output_index=self._place, part=OutputText("")),
        ]

    def extend(self, piece: Content) -> Delta:
        self._text += piece.text
        self._logprobs += piece.logprobs
        return OutputTextDelta(
            item_id=self._id, output_index=self._place, delta=piece.text, logprobs=list(piece.logprobs)
        )

    def closing(self, status: ItemStatus) -> list[Event]:
        text_done = OutputTextDone(item_id=self._id, output_index=self._place, text=self._text, logprobs=self._logprobs)
        return [
            text_done,
            ContentPartDone(item_id=self._id, output_index=self._place, part=self._text_part()),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        return Message(id=self._id, role="assistant", status=status, content=[self._text_part()])

    def _text_part(self) -> OutputText:
        return OutputText(self._text, logprobs=list(self._logprobs))


class OpenReasoning:
    """Reasoning in progress."""

    def __init__(self, response_id: str, place: int) -> None:
        self._id = item_id(Reasoning, response_id, place)
        self._place = place
        self._text = ""

    def continues_with(self, piece: Piece) -> bool:
        return isinstance(piece, ReasoningPiece)

    def opening(self) -> list[Event]:
        return [
            OutputItemAdded(output_index=self._place, item=Reasoning(id=self._id, content=[], status="in_progress")),
            ContentPartAdded(item_id=self._id, output_index=self._place, part=ReasoningText("")),
        ]

    def extend(self, piece: ReasoningPiece) -> Delta:
        self._text += piece.text
        return ReasoningTextDelta(item_id=self._id, output_index=self._place, delta=piece.text)

    def closing(self, status: ItemStatus) -> list[Event]:
        return [
            ReasoningTextDone(item_id=self._id, output_index=self._place, text=self._text),
            ContentPartDone(item_id=self._id, output_index=self._place, part=ReasoningText(self._text)),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        return Reasoning(id=self._id, content=[ReasoningText(self._text)], status=status)


class OpenCall:
    """A function call in progress."""

    def __init__(self, response_id: str, place: int, start: CallStart) -> None:
        self._id = item_id(FunctionCall, response_id, place)
        self._place = place
        self._call_id, self._name = start.call_id, start.name
        self._arguments = ""

    def continues_with(self, piece: Piece) -> bool:
        return isinstance(piece, CallArguments)

    def opening(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._place, item=self.item("in_progress"))]

    def extend(self, piece: CallArguments) -> Delta:
        self._arguments += piece.text
        return ArgumentsDelta(item_id=self._id, output_index=self._place, delta=piece.text)

    def closing(self, status: ItemStatus) -> list[Event]:
        return [
            ArgumentsDone(item_id=self._id, output_index=self._place, name=self._name, arguments=self._arguments),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        return FunctionCall(
            id=self._id, call_id=self._call_id, name=self._name, arguments=self._arguments, status=status
        )


def open_item(piece: Piece, response_id: str, place: int) -> OpenItem:
    """Return the item that starts with ``piece``."""
    match piece:
        case ReasoningPiece():
            return OpenReasoning(response_id, place)
        case Content():
            return OpenMessage(response_id, place)
        case CallStart():
            return OpenCall(response_id, place, piece)
        case CallArguments():
            raise ValueError("arguments of a call that was not started")
