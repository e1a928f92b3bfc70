"""The parts of an answer: its content, its reasoning and its tool calls."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import msgspec


class FunctionDelta(TypedDict):
    """An addition to a call. The name is sent once; ``arguments`` are concatenated."""

    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """An addition to the ``index``-th call of an answer. The first has an ``id`` if the model wrote one."""

    index: int
    function: FunctionDelta
    id: NotRequired[str]


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
