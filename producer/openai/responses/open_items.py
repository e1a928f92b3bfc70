"""Output items that are being written, and the events that open, extend and close them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import UNSET

from ..answers.pieces import CallArguments, CallStart, Content, Piece, ReasoningPiece
from ..tools.custom_input import CustomInputReader
from .items import (
    CustomToolCall,
    FunctionCall,
    Item,
    ItemStatus,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    ToolSearchCall,
    item_id,
)
from .objects import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    CustomInputDelta,
    CustomInputDone,
    Event,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from .offered_tools import TOOL_SEARCH, OfferedTool

DeltaEvent = OutputTextDelta | ReasoningTextDelta | ArgumentsDelta | CustomInputDelta


class OpenItem:
    """An item that is being written. Most start with one event, and hold nothing back.

    Attributes:
        continued_by: type of the pieces that extend the item.
    """

    continued_by: ClassVar[type[Piece]] = CallArguments

    def __init__(self, kind: type[Item], response_id: str, place: int) -> None:
        """``place`` is the item's output_index."""
        self._id = item_id(kind, response_id, place)
        self._place = place

    def opening(self) -> list[Event]:
        """Return the events that start the item."""
        return [OutputItemAdded(output_index=self._place, item=self.item("in_progress"))]

    def extend(self, piece: Any) -> DeltaEvent | None:
        """Add a piece that belongs to the item. Returns None if that adds nothing to report yet."""
        raise NotImplementedError

    def held_delta(self) -> DeltaEvent | None:
        """Return what was held back until the last piece; None if nothing was."""
        return None

    def closing(self, status: ItemStatus) -> list[Event]:
        """Return the events that end the item."""
        return [OutputItemDone(output_index=self._place, item=self.item(status))]

    def item(self, status: ItemStatus) -> Item:
        """Return the item in its current state."""
        raise NotImplementedError


class OpenMessage(OpenItem):
    """A message in progress."""

    continued_by = Content

    def __init__(self, response_id: str, place: int) -> None:
        super().__init__(Message, response_id, place)
        self._text = ""
        self._logprobs: list[Any] = []

    def opening(self) -> list[Event]:
        message = Message(id=self._id, role="assistant", status="in_progress", content=[])
        return [
            OutputItemAdded(output_index=self._place, item=message),
            ContentPartAdded(item_id=self._id, output_index=self._place, part=OutputText("")),
        ]

    def extend(self, piece: Content) -> DeltaEvent:
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


class OpenReasoning(OpenItem):
    """Reasoning in progress."""

    continued_by = ReasoningPiece

    def __init__(self, response_id: str, place: int) -> None:
        super().__init__(Reasoning, response_id, place)
        self._text = ""

    def opening(self) -> list[Event]:
        return [
            OutputItemAdded(output_index=self._place, item=Reasoning(id=self._id, content=[], status="in_progress")),
            ContentPartAdded(item_id=self._id, output_index=self._place, part=ReasoningText("")),
        ]

    def extend(self, piece: ReasoningPiece) -> DeltaEvent:
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


class OpenCall(OpenItem):
    """A function call in progress; ``tool`` is None if the model calls a function that was not offered."""

    def __init__(self, response_id: str, place: int, start: CallStart, tool: OfferedTool | None) -> None:
        super().__init__(FunctionCall, response_id, place)
        self._call_id = start.call_id
        self._name = start.name if tool is None else tool.name
        self._namespace = UNSET if tool is None or tool.namespace is None else tool.namespace
        self._arguments = ""

    def extend(self, piece: CallArguments) -> DeltaEvent:
        self._arguments += piece.text
        return ArgumentsDelta(item_id=self._id, output_index=self._place, delta=piece.text)

    def closing(self, status: ItemStatus) -> list[Event]:
        return [
            ArgumentsDone(item_id=self._id, output_index=self._place, name=self._name, arguments=self._arguments),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        return FunctionCall(
            id=self._id,
            call_id=self._call_id,
            name=self._name,
            arguments=self._arguments,
            status=status,
            namespace=self._namespace,
        )


class OpenCustomCall(OpenItem):
    """A call of a custom tool in progress. The model writes its input as a string within JSON."""

    def __init__(self, response_id: str, place: int, start: CallStart, tool: OfferedTool) -> None:
        super().__init__(CustomToolCall, response_id, place)
        self._call_id, self._tool = start.call_id, tool
        self._reader = CustomInputReader()
        self._input = ""

    def extend(self, piece: CallArguments) -> DeltaEvent | None:
        return self._add(self._reader.feed(piece.text))

    def held_delta(self) -> DeltaEvent | None:
        return self._add(self._reader.end_input())

    def closing(self, status: ItemStatus) -> list[Event]:
        return [
            CustomInputDone(item_id=self._id, output_index=self._place, input=self._input),
            OutputItemDone(output_index=self._place, item=self.item(status)),
        ]

    def item(self, status: ItemStatus) -> Item:
        namespace = UNSET if self._tool.namespace is None else self._tool.namespace
        return CustomToolCall(
            id=self._id,
            call_id=self._call_id,
            name=self._tool.name,
            input=self._input,
            status=status,
            namespace=namespace,
        )

    def _add(self, text: str) -> DeltaEvent | None:
        self._input += text
        return CustomInputDelta(item_id=self._id, output_index=self._place, delta=text) if text else None


class OpenToolSearch(OpenItem):
    """A search for tools in progress. It has no events for its arguments."""

    def __init__(self, response_id: str, place: int, start: CallStart) -> None:
        super().__init__(ToolSearchCall, response_id, place)
        self._call_id = start.call_id
        self._arguments = ""

    def extend(self, piece: CallArguments) -> DeltaEvent | None:
        self._arguments += piece.text
        return None

    def item(self, status: ItemStatus) -> Item:
        arguments: Any = {} if status == "in_progress" else _parsed(self._arguments)
        return ToolSearchCall(id=self._id, call_id=self._call_id, arguments=arguments, status=status)


def _parsed(arguments: str) -> Any:
    """Return the value of JSON, or the text itself if the model wrote invalid JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def open_item(piece: Piece, response_id: str, place: int, tools: Mapping[str, OfferedTool]) -> OpenItem:
    """Return the item that starts with ``piece``; a call becomes an item of the kind that its tool was offered as."""
    match piece:
        case ReasoningPiece():
            return OpenReasoning(response_id, place)
        case Content():
            return OpenMessage(response_id, place)
        case CallStart():
            tool = tools.get(piece.name)
            if tool is not None and tool.kind == "custom":
                return OpenCustomCall(response_id, place, piece, tool)
            if tool is not None and tool.kind == TOOL_SEARCH:
                return OpenToolSearch(response_id, place, piece)
            return OpenCall(response_id, place, piece, tool)
        case CallArguments():
            raise ValueError("arguments of a call that was not started")
