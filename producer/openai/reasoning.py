"""Split a model's text into its reasoning, which is enclosed by two marks, and its answer.

Invariant, as for tool calls: the output depends only on the characters, not on how they are split into deltas. The
marks and the whitespace around them are dropped; nothing else is lost.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...shared.errors import ValidationError
from ...shared.params.answer_formats import REASONING_FORMATS, ReasoningFormat
from ...shared.values.shown import shown

# Names of the switch that turns thinking off in chat templates of Qwen, DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")


def num_begun(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``mark``, and not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((num for num in range(longest, 0, -1) if text.endswith(mark[:num])), 0)


def safe_prefix_len(text: str, marker: str) -> int:
    """Return how many characters of ``text`` cannot be part of ``marker`` or of the whitespace before it."""
    return len(text[: len(text) - num_begun(text, marker)].rstrip())


def find_reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of that name.

    Raises:
        ValidationError: the name is unknown.
    """
    if name not in REASONING_FORMATS:
        names = ", ".join(sorted(REASONING_FORMATS))
        raise ValidationError(f"reasoning_parser must be one of {names}, got {shown(name)}")
    return REASONING_FORMATS[name]


def is_thinking_off(chat_template_kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether a request turns thinking off in its chat template."""
    return any((chat_template_kwargs or {}).get(switch) is False for switch in SWITCHES)


def effort_kwargs(reasoning_effort: str) -> dict[str, Any]:
    """Return the chat template's arguments for a ``reasoning_effort``."""
    switches = dict.fromkeys(SWITCHES, False) if reasoning_effort == "none" else {}
    return {"reasoning_effort": reasoning_effort, **switches}


class Split(NamedTuple):
    """Reasoning and content of a piece of text."""

    reasoning: str
    content: str


class _State(enum.Enum):
    BEFORE = enum.auto()  # only whitespace so far
    INSIDE = enum.auto()
    AFTER = enum.auto()  # after the end mark, before any content
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Splits one text.

    Args:
        is_inside: whether the text begins inside the reasoning. It may be set until the first text is fed.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, is_inside: bool | None = None) -> None:
        self._start, self._end = reasoning_format.start, reasoning_format.end
        self.is_inside = reasoning_format.starts_in_prompt if is_inside is None else is_inside
        self._state = _State.BEFORE
        self._has_reasoning = False
        self._held = ""

    def feed(self, text: str) -> Split:
        """Add a piece of text, and return the part that is certain by now."""
        if self._state is _State.CONTENT:
            return Split("", text)
        self._held += text
        if self._state is _State.BEFORE:
            self._find_start()
        reasoning = self._read_reasoning() if self._state is _State.INSIDE else ""
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def finish(self) -> Split:
        """End the text, and return the rest. Truncated reasoning may end in a part of the end mark."""
        rest, self._held = self._held, ""
        if self._state is _State.INSIDE or (self._state is _State.BEFORE and self.is_inside):
            return Split(rest.rstrip() if self._has_reasoning else rest.strip(), "")
        return Split("", rest)

    def _find_start(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(self._start):
            self._held = stripped[len(self._start) :]
            self._state = _State.INSIDE
        elif not self._start.startswith(stripped):
            self._state = _State.INSIDE if self.is_inside else _State.CONTENT

    def _read_reasoning(self) -> str:
        """Return more reasoning, without whitespace at either end."""
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        end = self._held.find(self._end)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(self._end) :]
            self._state = _State.AFTER
        else:
            certain = safe_prefix_len(self._held, self._end)
            reasoning, self._held = self._held[:certain], self._held[certain:]
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning


class MarkRemover:
    """Removes literals from a text.

    Args:
        marks: none of them contains another one but at its beginning or end.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._held = ""

    def feed(self, text: str) -> str:
        """Add a piece of text, and return the part that is certain by now."""
        self._held += text
        removed = ""
        while (place := self._first()) is not None:
            start, mark = place
            # A longer mark may still follow from here.
            if any(other.startswith(self._held[start:]) and other != mark for other in self._marks):
                return removed + self._pop(start)
            removed += self._pop(start)
            self._held = self._held[len(mark) :]
        num_held = max(num_begun(self._held, mark) for mark in self._marks)
        return removed + self._pop(len(self._held) - num_held)

    def finish(self) -> str:
        """End the text, and return the rest."""
        place = self._first()
        rest = self._held if place is None else self._held[: place[0]] + self._held[place[0] + len(place[1]) :]
        self._held = ""
        return rest

    def _first(self) -> tuple[int, str] | None:
        """Return the place of the first mark, of those the longest."""
        places = [(start, -len(mark), mark) for mark in self._marks if (start := self._held.find(mark)) >= 0]
        return (min(places)[0], min(places)[2]) if places else None

    def _pop(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        return text
