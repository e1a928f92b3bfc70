"""Splits a model's text into its reasoning, which stands between two marks, and its answer.

The invariant is that of the tool calls' parser: what comes out depends on the characters alone, not on how they were
cut. The marks go, and the whitespace around them; nothing else is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...shared.errors import ValidationError
from ...shared.params.reasoning import REASONING_MARKS
from ...shared.shown import shown
from .markers import len_of_certain

# What templates of models that can leave thinking out call the switch: Qwen, DeepSeek and Granite.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Args:
        starts_in_prompt: the chat template has written ``start`` at the end of the prompt, so that the text begins
            inside; some models repeat it all the same.
    """

    start: str
    end: str
    starts_in_prompt: bool = False


REASONING_PARSERS: dict[str, ReasoningFormat] = {
    name: ReasoningFormat(start, end, starts_in_prompt=name == "deepseek_r1")
    for name, (start, end) in REASONING_MARKS.items()
}


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of that name.

    Raises:
        ValidationError: there is none.
    """
    if name not in REASONING_PARSERS:
        known = ", ".join(sorted(REASONING_PARSERS))
        raise ValidationError(f"reasoning_parser must be one of {known}, got {shown(name)}")
    return REASONING_PARSERS[name]


def is_thinking_off(chat_template_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a request asks its template to leave thinking out."""
    return any((chat_template_kwargs or {}).get(switch) is False for switch in _SWITCHES)


def effort_kwargs(reasoning_effort: str) -> dict[str, Any]:
    """Return what a chat template is told of a ``reasoning_effort``."""
    switches = dict.fromkeys(_SWITCHES, False) if reasoning_effort == "none" else {}
    return {"reasoning_effort": reasoning_effort, **switches}


class Split(NamedTuple):
    """A part of each."""

    reasoning: str
    content: str


class _State(enum.Enum):
    BEFORE = enum.auto()  # nothing but whitespace has come
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # the end mark has come, and no content yet
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Splits one text.

    Args:
        is_inside: whether the text begins inside of the reasoning. It may be set until the first text comes.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, is_inside: bool | None = None) -> None:
        self._start, self._end = reasoning_format.start, reasoning_format.end
        self.is_inside = reasoning_format.starts_in_prompt if is_inside is None else is_inside
        self._state = _State.BEFORE
        self._has_reasoning = False
        self._held = ""

    def feed(self, text: str) -> Split:
        """Take the next text; return what is certain by now."""
        if self._state is _State.CONTENT:
            return Split("", text)
        self._held += text
        if self._state is _State.BEFORE:
            self._begin()
        reasoning = self._inside() if self._state is _State.INSIDE else ""
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def finish(self) -> Split:
        """The text has ended; return the rest. Reasoning that was cut may end in a part of the end mark."""
        rest, self._held = self._held, ""
        if self._state is _State.INSIDE or (self._state is _State.BEFORE and self.is_inside):
            return Split(rest.rstrip() if self._has_reasoning else rest.strip(), "")
        return Split("", rest)

    def _begin(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(self._start):
            self._held = stripped[len(self._start) :]
            self._state = _State.INSIDE
        elif not self._start.startswith(stripped):
            self._state = _State.INSIDE if self.is_inside else _State.CONTENT

    def _inside(self) -> str:
        """Give out reasoning, without whitespace at either end."""
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        end = self._held.find(self._end)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(self._end) :]
            self._state = _State.BEHIND
        else:
            certain = len_of_certain(self._held, self._end)
            reasoning, self._held = self._held[:certain], self._held[certain:]
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning
