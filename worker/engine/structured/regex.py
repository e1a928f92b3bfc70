r"""Rewrites regular expressions so that both backends match the same as Python's ``re.fullmatch``.

The libraries match the whole output, so an anchor at either end has no effect; xgrammar ignores anchors elsewhere. The
``.`` of xgrammar matches a line break, unlike Python's. In xgrammar ``\d``, ``\w`` and ``\s`` are ASCII, in llguidance
Unicode. llguidance also intersects and subtracts sets within a class, and xgrammar does not support ``\p`` there. So
classes and these escapes are written as ranges of code points, by the rules of ``pattern`` in a JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....shared.errors import ValidationError
from .charset import ESCAPE, class_of, read_class, set_of_escape

_PROPERTY = re.compile(r"\\[pP]")


def normalize_regex(pattern: str, field: str) -> str:
    r"""Return ``pattern`` without anchors at its ends, with ``.``, classes, ``\d``, ``\w`` and ``\s`` spelled out.

    Classes with ``\p`` remain unchanged; only llguidance supports them.

    Raises:
        ValidationError: an anchor is not at an end, or a class or an escape is invalid.
    """
    parts: list[str] = []
    depth = 0
    for index, piece in pieces(pattern):
        if piece == ".":
            parts.append(r"[^\n]")
        elif piece in ("^", "$"):
            _check_anchor(pattern, index, depth, field)
        elif piece[0] == "[":
            parts.append(_spell_class(piece, index, field))
        elif (char_set := set_of_escape(piece)) is not None:
            parts.append(class_of(char_set))
        else:
            depth += (piece == "(") - (piece == ")")
            parts.append(piece)
    return "".join(parts)


def has_property_in_class(pattern: str) -> bool:
    r"""Return whether a class of a normalized ``pattern`` has ``\p`` or ``\P``."""
    return any(piece[0] == "[" and _has_property(piece) for _, piece in pieces(pattern))


def pieces(pattern: str) -> Iterator[tuple[int, str]]:
    """Yield position and text of each piece: a whole class, a whole escape, or another single character."""
    index = 0
    while index < len(pattern):
        escape = ESCAPE.match(pattern, index)
        if escape is not None:
            piece, end = escape[0], escape.end()
        elif pattern[index] == "[":
            piece, end = _class_at(pattern, index)
        else:
            piece, end = pattern[index], index + 1
        yield index, piece
        index = end


def _class_at(pattern: str, index: int) -> tuple[str, int]:
    """Return the class that begins at ``index``, and its end; the rest of ``pattern`` if the class is not closed."""
    start = index + (2 if pattern[index + 1 : index + 2] == "^" else 1)
    head, end = pattern[index:start], start
    # A closing bracket at the start is a member of the class; it is escaped, so that every library reads it so.
    if pattern[start : start + 1] == "]":
        head, end = head + "\\]", start + 1
    body = end
    while end < len(pattern) and pattern[end] != "]":
        escape = ESCAPE.match(pattern, end)
        end = end + 1 if escape is None else escape.end()
    return head + pattern[body : end + 1], end + 1


def _has_property(piece: str) -> bool:
    return any(_PROPERTY.match(escape[0]) for escape in ESCAPE.finditer(piece))


def _spell_class(piece: str, index: int, field: str) -> str:
    if _has_property(piece):
        return piece
    try:
        return class_of(read_class(piece))
    except ValueError as error:
        raise ValidationError(f"{field}: {piece!r} at position {index} {error}") from error


def _check_anchor(pattern: str, index: int, depth: int, field: str) -> None:
    if pattern[index] == "^":
        is_at_end = index == 0 or pattern[index - 1] == "|"
    else:
        is_at_end = pattern[index + 1 : index + 2] in ("", "|")
    if depth or not is_at_end:
        raise ValidationError(
            f"{field}: {pattern[index]!r} at position {index} stands inside the pattern, where it is not supported; "
            f"the whole is matched, so leave it out"
        )
