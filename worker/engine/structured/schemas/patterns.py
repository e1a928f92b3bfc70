r"""Reads regular expressions of ``pattern`` where ECMA 262 and Python's ``re`` agree, and writes them for a library.

Supported are characters, classes, escapes, groups, ``|``, repetition, and anchors at the ends. Lookaround, back
references, word boundaries and flags are refused, because xgrammar ignores some of them. Where the two standards differ
(which digits ``\d`` matches, which line breaks ``.`` excludes), the output satisfies both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

from .....shared.errors import ValidationError
from ..charset import (
    Ranges,
    class_of,
    code_of_escape,
    complement,
    contains,
    read_class,
    set_of_escape,
    without,
)
from ..regex import pieces

# Characters that a JSON string must escape, and the short escapes of some of them.
_ESCAPED_IN_JSON: Ranges = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
_SPELLING = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}
_LINE_BREAKS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?")
_REPETITION = re.compile(r"[*+?]|\{(\d+)(?:,(\d*))?\}")
# xgrammar converts ASCII patterns to automata, which are wrong: the automaton of ``(?:b*a)?`` accepts "b". It converts
# other patterns to grammar rules, so a non-ASCII character that matches nothing is appended.
_WITHOUT_AUTOMATON = "é{0}"
# Characters that llguidance does not write unescaped and has no short escape for.
_UNWRITTEN: Ranges = [(0, 7), (11, 11), (14, 0x1F), (0x7F, 0x7F)]
# Limited because both libraries unroll counted repetition.
_MAX_REPETITION = 10_000
_AMBIGUOUS = re.compile(r"\\[dDwWsS]|(?<!\\)\.")
# The pattern that pydantic writes for Decimal, and an equivalent without lookahead, which requires at least one digit.
_EQUIVALENT = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}

# A part of an expression: text to copy, or the set of characters that it matches.
Part = str | Ranges


def text_in_json(pattern: str, place: str) -> str:
    r"""Convert a regular expression for a string to one for its JSON text between the quotes, for xgrammar.

    xgrammar matches ``pattern`` against the JSON text, and so allows output that is not JSON: an unescaped quote,
    backslash or control character, and these in a class, too, if the pattern has a backslash elsewhere. Therefore each
    character and class is replaced by those of its characters that need no escape, and by JSON's short escapes for the
    others. The result matches the whole string.

    Raises:
        ValidationError: a character or class matches nothing any more, or the pattern has an unsupported part.
    """
    parts = _Pattern(pattern, place).parts
    text = "".join(part if isinstance(part, str) else in_json(part, place) for part in parts)
    return f"(?:{text}){_WITHOUT_AUTOMATON}"


def anchored(pattern: str, place: str, *, must_be_exact: bool = False) -> str:
    """Return an equivalent regular expression of anchors, groups and classes of code points, for llguidance.

    Args:
        must_be_exact: whether to refuse a pattern whose result may match less than the original.

    Raises:
        ValidationError: the pattern has an unsupported part.
    """
    expression = _Pattern(pattern, place)
    if must_be_exact and not expression.is_exact:
        raise ValidationError(
            f"{place}: readings differ on what {pattern[:100]!r} matches, so no other names may stand beside it; "
            f"leave out alternatives, the dot, \\d, \\w and \\s, or set additionalProperties to false"
        )
    text = "".join(part if isinstance(part, str) else _writable_class(part, place) for part in expression.parts)
    # In JSON Schema, a pattern without an anchor matches anywhere in the string.
    start, end = ("" if expression.is_open_at_start else "^"), ("" if expression.is_open_at_end else "$")
    return f"{start}(?:{text}){end}"


class _Pattern:
    """A parsed pattern.

    Attributes:
        parts: the expression without anchors.
        is_exact: whether the parts match the same text as the pattern in all readings.
        is_open_at_start: whether other text may precede the match. False with alternatives, which must match the whole
            string.
        is_open_at_end: whether other text may follow the match; False with alternatives.
    """

    def __init__(self, pattern: str, place: str) -> None:
        self._place = place
        self._pattern = _EQUIVALENT.get(pattern, pattern)
        self.parts: list[Part] = list(self._read())
        has_alternatives = "|" in self._top_level
        self.is_exact = not has_alternatives and not _AMBIGUOUS.search(self._pattern)
        self.is_open_at_start = not has_alternatives and self._top_level[:1] != ["^"]
        self.is_open_at_end = not has_alternatives and self._top_level[-1:] != ["$"]

    def _read(self) -> Iterator[Part]:
        self._top_level: list[str] = []
        self._before, self._depth, self._may_repeat, self._end = "", 0, False, 0
        for index, piece in pieces(self._pattern):
            if index < self._end:  # part of a group or repetition that was already read
                continue
            if not self._depth:
                self._top_level.append(piece)
            self._end = index + 1
            yield self._part(piece, index)
            self._before = piece
        if self._depth:
            self._refuse(len(self._pattern), "leaves a group open")

    def _part(self, piece: str, index: int) -> Part:
        may_repeat, self._may_repeat = self._may_repeat, False
        if piece == "(":
            self._depth += 1
            return self._group(index)
        if piece == "|":
            return piece
        if piece in "^$":
            self._check_anchor(piece, index)
            return ""
        if piece in "*+?{":
            if not may_repeat:
                self._refuse(index, "repeats nothing; as a character it is written with a backslash")
            return self._repetition(index)
        self._may_repeat = True
        if piece == ")":
            if not self._depth:
                self._refuse(index, "closes no group")
            self._depth -= 1
            return piece
        return self._characters(piece, index)

    def _group(self, index: int) -> str:
        match = _GROUP.match(self._pattern, index)
        assert match is not None
        if self._pattern[match.end() : match.end() + 1] == "?" and match[0] == "(":
            self._refuse(index, "begins a lookaround or sets flags, which is not supported; say what may come instead")
        self._end = match.end()
        return "(?:"

    def _repetition(self, index: int) -> str:
        """Return the text of the repetition, without the lazy mark, which does not change the set of matches."""
        match = _REPETITION.match(self._pattern, index)
        if match is None:
            self._refuse(index, "is no repetition; as a character it is written \\{")
        counts = [int(count) for count in match.groups() if count]
        if counts != sorted(counts) or max(counts, default=0) > _MAX_REPETITION:
            self._refuse(index, f"must repeat ascending counts up to {_MAX_REPETITION}")
        following = self._pattern[match.end() : match.end() + 1]
        if following == "+":
            self._refuse(index, "is possessive, which is not supported; leave out the second +")
        self._end = match.end() + (following == "?")
        return match[0]

    def _characters(self, piece: str, index: int) -> Part:
        if piece == ".":
            return complement(_LINE_BREAKS)
        if piece[0] == "[":
            return self._class(piece, index)
        if piece[0] != "\\":
            return [(ord(piece), ord(piece))]
        char_set, code = set_of_escape(piece), code_of_escape(piece)
        if char_set is not None:
            return char_set
        octal = piece == "\\0" and self._pattern[index + 2 : index + 3].isdigit()
        if code is None or piece == "\\b" or octal or 0xD800 <= code <= 0xDFFF:
            self._refuse(index, "is an escape that is not supported", piece)
        return [(code, code)]

    def _class(self, piece: str, index: int) -> Ranges:
        try:
            return read_class(piece)
        except ValueError as error:
            self._refuse(index, str(error), piece)

    def _check_anchor(self, piece: str, index: int) -> None:
        beyond = self._before if piece == "^" else self._pattern[index + 1 : index + 2]
        if self._depth or beyond not in ("", "|"):
            self._refuse(index, "stands inside the pattern, where it is not supported; leave it out")

    def _refuse(self, index: int, reason: str, piece: str | None = None) -> NoReturn:
        excerpt = piece or self._pattern[index : index + 4] or "the end"
        raise ValidationError(f"{self._place}: pattern: {excerpt!r} at position {index} {reason}")


def is_written(text: str) -> bool:
    """Return whether llguidance writes all characters of ``text`` without numeric escapes."""
    return not any(contains(_UNWRITTEN, char) for char in text)


def _writable_class(ranges: Ranges, place: str) -> str:
    writable = without(ranges, _UNWRITTEN)
    if not writable:
        raise ValidationError(f"{place}: llguidance cannot match {class_of(ranges)} in a JSON string")
    return class_of(writable)


def in_json(ranges: Ranges, place: str, *, is_needed: bool = True) -> str:
    """Return a pattern for the JSON spelling of a character of ``ranges``.

    Args:
        is_needed: whether to raise if no character has a short spelling; otherwise the result is "".
    """
    plain, codes = spelled_in_json(ranges)
    escapes = "".join(f"\\u{ord(code):04x}" for code in codes)
    if not plain and not escapes:
        if not is_needed:
            return ""
        raise ValidationError(f"{place}: xgrammar cannot match {class_of(ranges)} in a JSON string")
    if plain and not escapes and len(plain) == 1 and plain[0][0] == plain[0][1]:
        return _literal(plain[0][0])
    alternatives = [class_of(plain)] if plain else []
    alternatives += [rf"\\[{escapes}]"] if escapes else []
    return f"(?:{'|'.join(alternatives)})"


def spelled_in_json(ranges: Ranges) -> tuple[Ranges, str]:
    """Return the characters that JSON writes unescaped, and for those with a short escape what follows its backslash.

    Other characters are left out.
    """
    return without(ranges, _ESCAPED_IN_JSON), "".join(
        code for char, code in _SPELLING.items() if contains(ranges, char)
    )


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or code > 0x7F else f"\\{char}" if char in r"\^$.|?*+()[]{}/-" else char


ANY_CHARACTER_IN_JSON = in_json(complement([]), "")
