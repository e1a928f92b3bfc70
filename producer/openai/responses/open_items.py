"""Pieces of a generation, and output items in progress. Each item creates the events that open, extend and close it."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from .items import FunctionCall, Item, ItemStatus, Message, OutputText, Reasoning, ReasoningText, item_id
from .objects import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    Event,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
)

Delta = OutputTextDelta | ReasoningTextDelta | ArgumentsDelta


class ReasoningPiece(msgspec.Struct, frozen=True):
    """More of the model's reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of the answer's text. ``logprobs`` are those of its tokens, if requested."""

    text: str
    logprobs: list[Any] = []


class CallStart(msgspec.Struct, frozen=True):
    """Start of a call of the function ``name``; its arguments follow. ``call_id`` has the form that the model's
    template accepts."""

    name: str
    call_id: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of the last call."""

    text: str


Piece = ReasoningPiece | Content | CallStart | CallArguments


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
            ContentPartDone(item_id=self._id, output_index=self._place, part=self._part()),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        return Message(id=self._id, role="assistant", status=status, content=[self._part()])

    def _part(self) -> OutputText:
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
