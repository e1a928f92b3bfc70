"""The text of a chat answer, told apart into what a message has fields for.

The seam for reasoning and tool calls: a parser is fed the text as it comes, and gives out of it what is certain. The
same text in other pieces must give the same parts in all, since a stream that is picked up again comes in others.
"""

from __future__ import annotations

from typing import NotRequired, Protocol, TypedDict

import msgspec

from .ends import OpenAIFinishReason


class FunctionDelta(TypedDict):
    """More of a call: its name comes once, ``arguments`` are to be joined."""

    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """More of the ``index``-th call of an answer."""

    index: int
    function: FunctionDelta


class MessageParts(msgspec.Struct):
    """What some text has said; a call stands once in ``tool_calls``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CallDelta] = []

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)

    def followed_by(self, more: MessageParts) -> MessageParts:
        """Return what both have said; a call that goes on stays one."""
        calls = {call["index"]: call for call in self.tool_calls}
        for call in more.tool_calls:
            before = calls.setdefault(call["index"], call)
            if before is not call:
                before["function"]["arguments"] += call["function"]["arguments"]
        return MessageParts(self.content + more.content, self.reasoning + more.reasoning, list(calls.values()))


class AnswerParser(Protocol):
    """Reads one answer, from its first character on."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        """Say whether the text begins within the reasoning, before it is fed; None if that is not known."""
        ...

    def feed(self, text: str) -> MessageParts:
        """Return what ``text`` makes certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        """Return what is still held back, as the text has ended; ``is_cut`` if by a limit."""
        ...

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        """Return why the answer ended, after ``finish``: "tool_calls" instead of "stop" if it calls tools."""
        ...


class PlainText:
    """All text is content."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        pass

    def feed(self, text: str) -> MessageParts:
        return MessageParts(text)

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        return MessageParts()

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return reason
