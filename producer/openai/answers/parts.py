"""Split the text of a chat answer into the fields of a message.

A parser of reasoning and tool calls is fed the text as it arrives, and returns the parts that are certain. The same
text in other pieces must give the same parts in total, because a resumed stream arrives in other pieces.
"""

from __future__ import annotations

from typing import NotRequired, Protocol, TypedDict

import msgspec

from .ends import OpenAIFinishReason


class FunctionDelta(TypedDict):
    """An addition to a call. The name is sent once; ``arguments`` are concatenated."""

    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """An addition to the ``index``-th call of an answer."""

    index: int
    function: FunctionDelta


class MessageParts(msgspec.Struct):
    """The parts of a piece of text. Each call has one entry in ``tool_calls``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CallDelta] = []

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)

    def followed_by(self, more: MessageParts) -> MessageParts:
        """Return the parts of both pieces of text. A call that continues stays one entry."""
        calls = {call["index"]: call for call in self.tool_calls}
        for call in more.tool_calls:
            before = calls.setdefault(call["index"], call)
            if before is not call:
                before["function"]["arguments"] += call["function"]["arguments"]
        return MessageParts(self.content + more.content, self.reasoning + more.reasoning, list(calls.values()))


class AnswerParser(Protocol):
    """Parser of one answer, from its first character on."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        """Set whether the text starts inside the reasoning, before it is fed; None if unknown."""
        ...

    def feed(self, text: str) -> MessageParts:
        """Return the parts that ``text`` makes certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        """End the text and return the parts still held back; ``is_cut`` if a limit ended it."""
        ...

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        """Return the finish reason, after ``finish``: "tool_calls" instead of "stop" if the answer calls tools."""
        ...


class PlainText:
    """Parser that returns all text as content."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        pass

    def feed(self, text: str) -> MessageParts:
        return MessageParts(text)

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        return MessageParts()

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return reason
