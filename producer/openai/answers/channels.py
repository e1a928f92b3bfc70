"""Parse answers in OpenAI's harmony format, in which each message has a channel.

A message is a header, ``<|message|>``, a body and a mark. "analysis" is reasoning, "final" and "commentary" are
content, and a message with a recipient is a tool call. Source: OpenAI, "Harmony response format".
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from ..reasoning import num_begun
from .common import OpenAIFinishReason
from .parts import CallDelta, FunctionDelta, MessageParts

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", *_BEGINS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_MAX_HEADER_CHARS = 512


class ChannelParser:
    """Splits one answer into reasoning, content and tool calls; see ``AnswerParser``.

    Text without a header is content. So is a call of a function that the request does not offer.

    Args:
        functions: names of the tools that the request offers.
        whole: emit complete calls only.
        is_single: whether only the first call is returned.
        includes_reasoning: whether reasoning is returned to the caller.
    """

    def __init__(self, functions: Collection[str], *, whole: bool, is_single: bool, includes_reasoning: bool) -> None:
        self._functions = functions
        self._whole = whole
        self._is_single = is_single
        self._includes_reasoning = includes_reasoning
        self._text = ""  # not settled: a header, or the end of a body
        self._is_first = True
        self._num_calls = 0
        self._has_text = self._has_reasoning = self._has_content = False
        self._begin_message("")

    def begin(self, *, in_reasoning: bool | None) -> None:
        pass  # each message has a header

    def feed(self, text: str) -> MessageParts:
        self._text += text
        parts = MessageParts()
        while self._header is None or self._text:
            if self._header is None:
                more = self._read_header()
            elif self._is_first and (is_header := self._begins_with_header()) is not False:
                if is_header is None:
                    break
                self._header, self._is_first = None, False
                continue
            else:
                self._is_first = False
                more = self._read_body()
            if more is None:
                break
            parts = parts.followed_by(more)
        return parts

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        rest, self._text = self._text, ""
        if self._header is None:
            # A truncated header of a message that says nothing.
            is_mark = any(rest.startswith(begin[: len(rest)]) for begin in _BEGINS) or _CHANNEL.search(rest)
            return MessageParts() if is_mark else MessageParts(content=rest)
        parts = self._body_parts(rest) if rest else MessageParts()
        return parts.followed_by(self._end_message(is_cut=is_cut))

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _begins_with_header(self) -> bool | None:
        """Return whether the answer starts with a header; None if that is not yet certain."""
        text = self._text.lstrip()
        begins = (*_BEGINS, "to=")
        if any(text.startswith(begin) for begin in begins):
            return True
        return None if any(begin.startswith(text) for begin in begins) else False

    def _read_header(self) -> MessageParts | None:
        end = self._text.find(_MESSAGE, 0, _MAX_HEADER_CHARS)
        if end >= 0:
            header, self._text = self._text[:end], self._text[end + len(_MESSAGE) :]
            self._begin_message(header)
            self._has_text = False
            return MessageParts() if self._function is None or self._whole else self._call_parts("", self._function)
        if len(self._text) < _MAX_HEADER_CHARS:
            return None
        # No header is that long. Its first character is content, so that a mark at its start is not read again.
        self._begin_message("")
        first, self._text = self._text[:1], self._text[1:]
        return self._body_parts(first)

    def _begin_message(self, header: str) -> None:
        """Derive from ``header`` the kind of the message that follows."""
        self._header: str | None = header  # None while a header is being read
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_reasoning = channel is not None and channel[1] == "analysis"
        is_call = recipient is not None and recipient[1] in self._functions
        self._function = recipient[1] if recipient is not None and is_call else None
        self._arguments = ""

    def _read_body(self) -> MessageParts | None:
        places = [(start, mark) for mark in _ENDS if (start := self._text.find(mark)) >= 0]
        if not places:
            certain = len(self._text) - max(num_begun(self._text, mark) for mark in _ENDS)
            body, self._text = self._text[:certain], self._text[certain:]
            return self._body_parts(body) if body else None
        start, mark = min(places)
        body, self._text = self._text[:start], self._text[start if mark in _BEGINS else start + len(mark) :]
        parts = self._body_parts(body).followed_by(self._end_message())
        self._header = None
        return parts

    def _body_parts(self, body: str) -> MessageParts:
        """Return a part of a body."""
        if not body:
            return MessageParts()
        if self._function is not None:
            self._arguments += body
            return MessageParts() if self._whole else self._call_parts(body)
        is_new, self._has_text = not self._has_text, True
        if not self._is_reasoning:
            separator = "\n" if is_new and self._has_content else ""
            self._has_content = True
            return MessageParts(content=separator + body)
        if not self._includes_reasoning:
            return MessageParts()
        separator = "\n" if is_new and self._has_reasoning else ""
        self._has_reasoning = True
        return MessageParts(reasoning=separator + body)

    def _end_message(self, *, is_cut: bool = False) -> MessageParts:
        """End the message, and return its parts that were held back."""
        if self._function is None:
            return MessageParts()
        parts = MessageParts()
        if self._whole:
            if not is_cut and not _is_object(self._arguments):
                return MessageParts(content=f"{self._header}{_MESSAGE}{self._arguments}")
            parts = self._call_parts(self._arguments or "{}", self._function)
        elif not self._arguments:
            parts = self._call_parts("{}")
        self._num_calls += 1
        return parts

    def _call_parts(self, arguments: str, name: str | None = None) -> MessageParts:
        """Return a part of the call; the first one has the ``name`` of the function."""
        if self._is_single and self._num_calls:
            return MessageParts()
        function = FunctionDelta(arguments=arguments)
        if name is not None:
            function["name"] = name
        return MessageParts(tool_calls=[CallDelta(index=self._num_calls, function=function)])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
