"""Read calls that are written as Python's calls, such as ``[add(a=1, b=[2, None])]``, and write arguments as JSON."""

from __future__ import annotations

import re

from .call_reader import CallReader
from .json_reader import MAX_NESTING, MalformedError, Reader, skip_whitespace
from .values import escaped, json_string

_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_WORD_CHARS = 256


def read_python_call(reader: CallReader, char: str) -> Reader[str]:
    """Read one call. Its arguments must have names. Returns the character after its parenthesis."""
    name, char = yield from _read_word(char, ".")
    if char != "(":
        raise MalformedError
    reader.begin(name)
    reader.write("{")
    keys: set[str] = set()
    char = yield from skip_whitespace((yield))
    while char != ")":
        key, char = yield from _read_word(char)
        char = yield from skip_whitespace(char)
        if char != "=" or key in keys:
            raise MalformedError
        reader.write(f"{', ' if keys else ''}{json_string(key)}: ")
        keys.add(key)
        char = yield from _read_value(reader, (yield from skip_whitespace((yield))), 0)
        char = yield from _read_comma(char, ")")
    reader.write("}")
    reader.complete(end=reader.position + 1)
    return (yield)


def _read_comma(char: str, close: str) -> Reader[str]:
    """Read a comma, unless ``close`` follows. Returns ``close`` or the first character after the comma."""
    char = yield from skip_whitespace(char)
    if char == ",":
        return (yield from skip_whitespace((yield)))
    if char != close:
        raise MalformedError
    return char


def _read_word(char: str, others: str = "") -> Reader[tuple[str, str]]:
    word = ""
    while char and (char.isalnum() or char in "_-" or char in others):
        word += char
        char = yield
        if len(word) > _MAX_WORD_CHARS:
            raise MalformedError
    if not word:
        raise MalformedError
    return word, char


def _read_value(reader: CallReader, char: str, nesting: int) -> Reader[str]:
    """Read a literal, and write it as JSON."""
    if nesting == MAX_NESTING:
        raise MalformedError
    if char in ("'", '"'):
        return (yield from _read_string(reader, char))
    if char == "{":
        return (yield from _read_dict(reader, nesting))
    if char in ("[", "("):
        return (yield from _read_list(reader, "]" if char == "[" else ")", nesting))
    word = ""
    while char and (char.isalnum() or char in "+-._"):
        word += char
        char = yield
        if len(word) > _MAX_WORD_CHARS:
            raise MalformedError
    reader.write(_scalar(word))
    return char


def _scalar(word: str) -> str:
    """Return a number or constant as JSON."""
    if word in _WORDS:
        return _WORDS[word]
    match = _NUMBER.fullmatch(word)
    if match is None or not any(char.isdigit() for char in word):
        raise MalformedError
    digits, fraction = (match[1] or "0").replace("_", "").lstrip("0") or "0", match[2] or ""
    if fraction == ".":
        fraction = ".0"
    return f"{'-' if word[0] == '-' else ''}{digits}{fraction}{match[3] or ''}"


def _read_list(reader: CallReader, close: str, nesting: int) -> Reader[str]:
    reader.write("[")
    char = yield from skip_whitespace((yield))
    separator = ""
    while char != close:
        reader.write(separator)
        separator = ", "
        char = yield from _read_value(reader, char, nesting + 1)
        char = yield from _read_comma(char, close)
    reader.write("]")
    return (yield)


def _read_dict(reader: CallReader, nesting: int) -> Reader[str]:
    reader.write("{")
    char = yield from skip_whitespace((yield))
    separator = ""
    while char != "}":
        if char not in ("'", '"'):
            raise MalformedError
        reader.write(separator)
        separator = ", "
        char = yield from _read_string(reader, char)
        char = yield from skip_whitespace(char)
        if char != ":":
            raise MalformedError
        reader.write(": ")
        char = yield from _read_value(reader, (yield from skip_whitespace((yield))), nesting + 1)
        char = yield from _read_comma(char, "}")
    reader.write("}")
    return (yield)


def _read_string(reader: CallReader, quote: str) -> Reader[str]:
    """Read a string between ``quote``, and write it as it arrives."""
    reader.write('"')
    while (char := (yield)) != quote:
        if not char:
            raise MalformedError
        reader.write(escaped((yield from _read_escape()) if char == "\\" else char))
    reader.write('"')
    return (yield)


def _read_escape() -> Reader[str]:
    char = yield
    if not char:
        raise MalformedError
    if char not in _HEX_DIGITS:
        # Python keeps the backslash of an unknown escape.
        return _ESCAPES.get(char, char if char in ("'", '"', "\\") else f"\\{char}")
    code = yield from _read_hex(_HEX_DIGITS[char])
    if 0xD800 <= code < 0xDC00:
        # JSON's spelling of a character beyond 16 bits, which some models use in Python too.
        code = yield from _read_low_surrogate(code)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise MalformedError
    return chr(code)


def _read_low_surrogate(high: int) -> Reader[int]:
    for expected in "\\u":
        if (yield) != expected:
            raise MalformedError
    low = yield from _read_hex(4)
    if not 0xDC00 <= low < 0xE000:
        raise MalformedError
    return 0x10000 + (high - 0xD800) * 0x400 + (low - 0xDC00)


def _read_hex(num_digits: int) -> Reader[int]:
    digits = ""
    while len(digits) < num_digits:
        digit = yield
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise MalformedError
        digits += digit
    return int(digits, 16)
