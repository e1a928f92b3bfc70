"""Read JSON one character at a time, with generators that are sent characters.

A reader starts with the value's first character, and returns the first character after the value. The end of the text
is sent as an empty string. Invalid JSON raises ``MalformedError`` at the first invalid character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from ..reasoning import num_begun

T = TypeVar("T")
Reader = Generator[None, str, T]

MAX_NESTING = 64

_WHITESPACE = frozenset(" \t\n\r")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}


class MalformedError(Exception):
    """The character that was sent is invalid at this position."""


def skip_whitespace(char: str) -> Reader[str]:
    """Return the first character, from ``char`` on, that is not whitespace."""
    while char in _WHITESPACE:
        char = yield
    return char


def read_value(char: str, nesting: int = 0) -> Reader[str]:
    """Read any JSON value."""
    if char == "{":
        return (yield from _read_object(nesting))
    if char == "[":
        return (yield from _read_array(nesting))
    if char == '"':
        return (yield from read_string(char))[1]
    if char in _WORDS:
        return (yield from read_literally(_WORDS[char], char))
    return (yield from _read_number(char))


def read_string(char: str) -> Reader[tuple[str, str]]:
    """Read a string. Returns the decoded string and the next character."""
    if char != '"':
        raise MalformedError
    raw = ['"']
    while (char := (yield)) != '"':
        if char < " ":  # a control character, or the end of the text
            raise MalformedError
        raw.append(char)
        if char == "\\":
            raw.append((yield from _read_escape()))
    raw.append('"')
    return json.loads("".join(raw)), (yield)


def read_literally(text: str, char: str) -> Reader[str]:
    """Read exactly ``text``, which is not empty."""
    for expected in text:
        if char != expected:
            raise MalformedError
        char = yield
    return char


def read_one_of(literals: Sequence[str], char: str) -> Reader[tuple[str, str]]:
    """Read one of ``literals``, of which none starts with another. Returns it and the next character."""
    candidates, length = literals, 0
    while True:
        candidates = [literal for literal in candidates if char and literal[length] == char]
        if not candidates:
            raise MalformedError
        length += 1
        char = yield
        if len(candidates[0]) == length:
            return candidates[0], char


def read_until(close: str, char: str, write: Callable[[str], object], *, drops_line_break: bool = False) -> Reader[str]:
    """Read any text up to the literal ``close``, and pass it to ``write`` as soon as it is certain.

    Returns the character after ``close``.

    Args:
        drops_line_break: whether a line break before ``close`` is part of it.
    """
    literals = (f"\n{close}", close) if drops_line_break else (close,)
    pending = ""
    while char:
        pending += char
        if pending.endswith(close):
            end = next(literal for literal in literals if pending.endswith(literal))
            write(pending.removesuffix(end))
            return (yield)
        certain = len(pending) - max(num_begun(pending, literal) for literal in literals)
        if certain:
            write(pending[:certain])
            pending = pending[certain:]
        char = yield
    raise MalformedError


def _read_escape() -> Reader[str]:
    char = yield
    if char not in _ESCAPED:
        raise MalformedError
    if char != "u":
        return char
    digits = ""
    while len(digits) < 4:
        digit = yield
        if digit not in _HEX:
            raise MalformedError
        digits += digit
    return "u" + digits


def _read_number(char: str) -> Reader[str]:
    raw = ""
    while char in _NUMBER_CHARS:
        raw += char
        char = yield
    if not _NUMBER.fullmatch(raw):
        raise MalformedError
    return char


def _read_array(nesting: int) -> Reader[str]:
    if nesting == MAX_NESTING:
        raise MalformedError
    char = yield from skip_whitespace((yield))
    if char == "]":
        return (yield)
    while True:
        char = yield from read_value(char, nesting + 1)
        char = yield from skip_whitespace(char)
        if char == "]":
            return (yield)
        char = yield from _read_comma(char)


def _read_object(nesting: int) -> Reader[str]:
    if nesting == MAX_NESTING:
        raise MalformedError
    char = yield from skip_whitespace((yield))
    if char == "}":
        return (yield)
    while True:
        _, char = yield from read_key(char)
        char = yield from read_value(char, nesting + 1)
        char = yield from skip_whitespace(char)
        if char == "}":
            return (yield)
        char = yield from _read_comma(char)


def read_key(char: str) -> Reader[tuple[str, str]]:
    """Read a key and its colon. Returns the key and the first character of the value."""
    key, char = yield from read_string(char)
    char = yield from skip_whitespace(char)
    if char != ":":
        raise MalformedError
    return key, (yield from skip_whitespace((yield)))


def _read_comma(char: str) -> Reader[str]:
    if char != ",":
        raise MalformedError
    return (yield from skip_whitespace((yield)))
