"""The text of a chat answer, told apart into what a message has fields for.

The seam for reasoning and tool calls: a parser is fed the text as it comes, and gives out of it what is certain. The
same text in other pieces must give the same parts in all, since a stream that is picked up again comes in others.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from .common import OpenAIFinishReason


class MessageParts(msgspec.Struct):
    """What some text has said. ``tool_calls`` are those of a streamed delta: the first of each has id and name."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)


class AnswerParser(Protocol):
    """Reads one answer, from its first character on."""

    def feed(self, text: str) -> MessageParts:
        """Return what ``text`` makes certain."""
        ...

    def finish(self) -> MessageParts:
        """Return what is still held back, as the text has ended."""
        ...

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        """Return why the answer ended, after ``finish``: "tool_calls" instead of "stop" if it calls tools."""
        ...


class PlainText:
    """All text is content."""

    def feed(self, text: str) -> MessageParts:
        return MessageParts(text)

    def finish(self) -> MessageParts:
        return MessageParts()

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return reason
