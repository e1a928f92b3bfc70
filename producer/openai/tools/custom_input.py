"""Read the input of a custom tool from the JSON arguments in which a model writes it: ``{"input": "..."}``.

The input is decoded as it arrives. It depends only on the characters, not on how they are split.
"""

from __future__ import annotations

import json
import re

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NUM_UNICODE_CHARS = 6  # of an escape with four digits
_REPLACEMENT = "\ufffd"


class CustomInputReader:
    """Reads the arguments of one call.

    Arguments that do not begin with the key ``input`` and a string are held back until their end. Then the input is the
    value of ``input`` if it is a string, else the arguments themselves.
    """

    def __init__(self) -> None:
        self._text = ""
        self._is_inside = False  # of the string
        self._is_over = False

    def feed(self, text: str) -> str:
        """Add a part of the arguments, and return the part of the input that is certain by now."""
        if self._is_over:
            return ""
        self._text += text
        if not self._is_inside:
            match = _START.match(self._text)
            if match is None:
                return ""
            self._is_inside, self._text = True, self._text[match.end() :]
        return self._unescaped_part(is_end=False)

    def end_input(self) -> str:
        """End the arguments, and return the rest of the input."""
        if self._is_over:
            return ""
        return self._unescaped_part(is_end=True) if self._is_inside else _whole_input(self._text)

    def _unescaped_part(self, *, is_end: bool) -> str:
        """Return the decoded characters up to the end of the string, or to an incomplete escape."""
        decoded: list[str] = []
        position, text = 0, self._text
        while position < len(text) and not self._is_over:
            char = text[position]
            if char == '"':
                self._is_over = True
            elif char == "\\":
                part, num_chars = _unescape(text[position : position + 2 * _NUM_UNICODE_CHARS], is_end=is_end)
                if not num_chars:
                    break
                decoded.append(part)
                position += num_chars
            else:
                decoded.append(char)
                position += 1
        self._text = text[position:]
        return "".join(decoded)


def decoded_input(arguments: str) -> str:
    """Return the input of a call whose arguments are complete, or cut off by a limit."""
    reader = CustomInputReader()
    return reader.feed(arguments) + reader.end_input()


def _unescape(text: str, *, is_end: bool) -> tuple[str, int]:
    """Return the characters of the escape that ``text`` begins with, and its length; 0 if it is incomplete."""
    if len(text) < 2:
        return "", 0
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[1]), 2
    first = _code_unit(text)
    if first is None:
        return ("", 0) if len(text) < _NUM_UNICODE_CHARS else (_REPLACEMENT, 2)
    if not 0xD800 <= first < 0xE000:
        return chr(first), _NUM_UNICODE_CHARS
    rest = text[_NUM_UNICODE_CHARS:]
    second = _code_unit(rest)
    if first < 0xDC00 and second is not None and 0xDC00 <= second < 0xE000:
        return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)), 2 * _NUM_UNICODE_CHARS
    may_continue = first < 0xDC00 and len(rest) < _NUM_UNICODE_CHARS and "\\u".startswith(rest[:2])
    if may_continue and not is_end:
        return "", 0
    return _REPLACEMENT, _NUM_UNICODE_CHARS


def _code_unit(text: str) -> int | None:
    """Return the number of a complete escape with four digits at the start of ``text``; None if there is none."""
    is_escape = text.startswith("\\u") and _HEX.fullmatch(text[2:_NUM_UNICODE_CHARS]) is not None
    return int(text[2:_NUM_UNICODE_CHARS], 16) if is_escape else None


def _whole_input(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
