"""Character classes of regular expressions as sets of code points."""

from __future__ import annotations

import functools
import re
import warnings

Ranges = list[tuple[int, int]]

ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_LAST = 0x10FFFF
_SURROGATES: Ranges = [(0xD800, 0xDFFF)]
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "b": 8, "0": 0}
_DIGITS: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [(9, 13), (32, 32)]
# Spaces beyond ASCII in Python or JavaScript.
_OTHER_SPACE: Ranges = [
    (0x1C, 0x1F),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
]


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in ``ranges``. Surrogates are not characters."""
    result: Ranges = []
    start = 0
    for low, high in sorted(ranges + _SURROGATES):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return result if start > _LAST else [*result, (start, _LAST)]


def without(ranges: Ranges, excluded: Ranges) -> Ranges:
    """Return the characters of ``ranges`` that are not in ``excluded``."""
    return complement(complement(ranges) + excluded)


def contains(ranges: Ranges, char: str) -> bool:
    """Return whether ``char`` is in ``ranges``."""
    return any(low <= ord(char) <= high for low, high in ranges)


def read_class(text: str) -> Ranges:
    """Return the characters that the class ``text`` of a caller's expression matches.

    Raises:
        ValueError: it is not a class, matches nothing, or has an unknown escape. The message is a predicate.
    """
    for escape in ESCAPE.finditer(text):
        if set_of_escape(escape[0]) is None and code_of_escape(escape[0]) is None:
            raise ValueError(f"has {escape[0]}, an escape that is not supported")
    try:
        with warnings.catch_warnings(action="ignore"):  # about brackets in the class, which are read as characters
            re.compile(text)
    except re.error as error:
        raise ValueError(f"is no class: {error.msg}") from error
    ranges = parse_class(text)
    if not ranges:
        raise ValueError("is a class that matches nothing")
    return ranges


def parse_class(text: str) -> Ranges:
    """Return the characters that ``[…]`` matches, where digits, word characters and spaces are those of ASCII."""
    is_negated = text.startswith("[^")
    items = _items(text[2 if is_negated else 1 : -1], is_negated)
    ranges: Ranges = []
    index = 0
    while index < len(items):
        item = items[index]
        if (
            isinstance(item, int)
            and items[index + 1 : index + 2] == ["-"]
            and isinstance(_at(items, index + 2), int | str)
        ):
            ranges.append((item, _code(items[index + 2])))
            index += 3
            continue
        ranges += item if isinstance(item, list) else [(_code(item), _code(item))]
        index += 1
    return complement(ranges) if is_negated else without(ranges, [])


def class_of(ranges: Ranges) -> str:
    """Return a class that matches ``ranges``."""
    items = [_spell(low) if low == high else f"{_spell(low)}-{_spell(high)}" for low, high in ranges]
    return f"[{''.join(items)}]"


def code_of_escape(escape: str) -> int | None:
    """Return the code point of an escape for one character; None for other escapes."""
    code = escape[1:]
    if len(code) > 1:
        return int(code[1:], 16)
    if code in _CONTROLS:
        return _CONTROLS[code]
    return None if not code or code.isalnum() else ord(code)


def set_of_escape(escape: str, *, is_excluded: bool = False) -> Ranges | None:
    r"""Return the set of ``\\d`` and similar escapes; None for other escapes.

    The readings of regular expressions differ beyond ASCII. So the set has only characters that every reading includes.

    Args:
        is_excluded: return every character that any reading includes, because the set will be excluded.
    """
    name = escape[1:]
    certain_chars = {"d": _DIGITS, "w": _WORD, "s": _SPACE}.get(name.lower())
    if certain_chars is None:
        return None
    if name.isupper():
        return complement(certain_chars if is_excluded else _possible_chars(name.lower()))
    return _possible_chars(name) if is_excluded else certain_chars


@functools.cache
def _possible_chars(name: str) -> Ranges:
    """Return every character that any reading, also a Unicode one, includes in ``\\d``, ``\\s`` or ``\\w``."""
    if name == "d":
        digits = [code for code in range(0x80, 0x20000) if chr(code).isdecimal()]
        return [*_DIGITS, *((code, code) for code in digits)]
    return [*_SPACE, *_OTHER_SPACE] if name == "s" else [*_WORD, (0x80, _LAST)]


def _items(inside: str, is_excluded: bool) -> list[int | str | Ranges]:
    """Return the items of a class: code points, sets, and "-" where it may form a range."""
    items: list[int | str | Ranges] = []
    index = 0
    while index < len(inside):
        escape = ESCAPE.match(inside, index)
        if escape is None:
            items.append("-" if inside[index] == "-" else ord(inside[index]))
            index += 1
            continue
        char_set = set_of_escape(escape[0], is_excluded=is_excluded)
        code = code_of_escape(escape[0])
        items.append(char_set if char_set is not None else code if code is not None else ord(escape[0][-1]))
        index = escape.end()
    return items


def _at(items: list[int | str | Ranges], index: int) -> int | str | Ranges | None:
    return items[index] if index < len(items) else None


def _code(item: int | str | Ranges) -> int:
    return item if isinstance(item, int) else ord("-")


def _spell(code: int) -> str:
    return chr(code) if code > 0xFFFF else f"\\u{code:04x}"
