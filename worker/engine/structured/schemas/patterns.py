r"""The regular expressions of ``pattern``, read as ECMA 262 and Python's ``re`` agree to read them.

What is read: characters, classes, escapes, groups, ``|``, repetition, and anchors at the ends. Lookaround, references
back, word boundaries and flags are refused: xgrammar passes over some of them. Where the two readings differ (which
digits ``\d`` knows, which line breaks ``.`` does not) what is written satisfies both.
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

# What a JSON string may not hold as it is, and how it spells some of it.
_ESCAPED_IN_JSON: Ranges = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
_SPELLING = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}
_LINE_BREAKS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?")
_REPETITION = re.compile(r"[*+?]|\{(\d+)(?:,(\d*))?\}")
# xgrammar makes automata of patterns in ASCII, and they are wrong: that of ``(?:b*a)?`` takes "b". Of others it makes
# rules of its grammar.
_WITHOUT_AUTOMATON = "é{0}"
# What llguidance does not write as it is, and has no short escape for.
_UNWRITTEN: Ranges = [(0, 7), (11, 11), (14, 0x1F), (0x7F, 0x7F)]
# Both libraries unroll what is counted.
_MAX_REPETITION = 10_000
_AMBIGUOUS = re.compile(r"\\[dDwWsS]|(?<!\\)\.")
# What pydantic writes for Decimal, and the same without looking ahead: at least one digit.
_EQUIVALENT = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}

# A part of an expression: what it is written as, or the characters that it matches.
Part = str | Ranges


def text_in_json(pattern: str, place: str) -> str:
    r"""From a regular expression of a string to one of how JSON spells it, between the quotes; for xgrammar.

    It takes ``pattern`` for the spelled text and lets through what makes the output no JSON: a quote, a backslash
    or a control character as it is, in a class too once there is a backslash elsewhere. So each character and class
    becomes what it matches of text that needs no escape, or one of JSON's short escapes. The whole string is matched.

    Raises:
        ValidationError: nothing is left of a character or class, or the pattern has what is not supported.
    """
    parts = _Pattern(pattern, place).parts
    text = "".join(part if isinstance(part, str) else in_json(part, place) for part in parts)
    return f"(?:{text}){_WITHOUT_AUTOMATON}"


def anchored(pattern: str, place: str, *, must_be_exact: bool = False) -> str:
    """A regular expression that says the same with anchors, groups and classes of code points; for llguidance.

    Args:
        must_be_exact: whether it is no good if it matches less.

    Raises:
        ValidationError: the pattern has what is not supported.
    """
    read = _Pattern(pattern, place)
    if must_be_exact and not read.is_exact:
        raise ValidationError(
            f"{place}: readings differ on what {pattern[:100]!r} matches, so no other names may stand beside it; "
            f"leave out alternatives, the dot, \\d, \\w and \\s, or set additionalProperties to false"
        )
    text = "".join(part if isinstance(part, str) else _written(part, place) for part in read.parts)
    # As everywhere in JSON Schema, a pattern without an anchor matches anywhere.
    start, end = ("" if read.is_open_at_start else "^"), ("" if read.is_open_at_end else "$")
    return f"{start}(?:{text}){end}"


class _Pattern:
    """A pattern that was read.

    Attributes:
        parts: of what matches the whole string, without anchors.
        is_open_at_start: whether anything may come before. Not with alternatives: then the whole is matched.
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
            if index < self._end:  # within what was read as a whole
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
        found = _GROUP.match(self._pattern, index)
        assert found is not None
        if self._pattern[found.end() : found.end() + 1] == "?" and found[0] == "(":
            self._refuse(index, "begins a lookaround or sets flags, which is not supported; say what may come instead")
        self._end = found.end()
        return "(?:"

    def _repetition(self, index: int) -> str:
        """Its text, without the mark of laziness, which changes nothing of what is matched."""
        found = _REPETITION.match(self._pattern, index)
        if found is None:
            self._refuse(index, "is no repetition; as a character it is written \\{")
        counts = [int(count) for count in found.groups() if count]
        if counts != sorted(counts) or max(counts, default=0) > _MAX_REPETITION:
            self._refuse(index, f"must repeat ascending counts up to {_MAX_REPETITION}")
        following = self._pattern[found.end() : found.end() + 1]
        if following == "+":
            self._refuse(index, "is possessive, which is not supported; leave out the second +")
        self._end = found.end() + (following == "?")
        return found[0]

    def _characters(self, piece: str, index: int) -> Part:
        if piece == ".":
            return complement(_LINE_BREAKS)
        if piece[0] == "[":
            return self._class(piece, index)
        if piece[0] != "\\":
            return [(ord(piece), ord(piece))]
        known, code = set_of_escape(piece), code_of_escape(piece)
        if known is not None:
            return known
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

    def _refuse(self, index: int, why: str, piece: str | None = None) -> NoReturn:
        shown = piece or self._pattern[index : index + 4] or "the end"
        raise ValidationError(f"{self._place}: pattern: {shown!r} at position {index} {why}")


def is_written(text: str) -> bool:
    """Whether llguidance writes all characters of ``text`` without an escape by number."""
    return not any(contains(_UNWRITTEN, char) for char in text)


def _written(ranges: Ranges, place: str) -> str:
    written = without(ranges, _UNWRITTEN)
    if not written:
        raise ValidationError(f"{place}: llguidance cannot match {class_of(ranges)} in a JSON string")
    return class_of(written)


def in_json(ranges: Ranges, place: str, *, is_needed: bool = True) -> str:
    """How JSON spells one of ``ranges``; "" if it has no short spelling and none is needed."""
    plain = without(ranges, _ESCAPED_IN_JSON)
    escapes = "".join(f"\\u{ord(code):04x}" for char, code in _SPELLING.items() if contains(ranges, char))
    if not plain and not escapes:
        if not is_needed:
            return ""
        raise ValidationError(f"{place}: xgrammar cannot match {class_of(ranges)} in a JSON string")
    if plain and not escapes and len(plain) == 1 and plain[0][0] == plain[0][1]:
        return _literal(plain[0][0])
    alternatives = [class_of(plain)] if plain else []
    alternatives += [rf"\\[{escapes}]"] if escapes else []
    return f"(?:{'|'.join(alternatives)})"


def _literal(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() or code > 0x7F else f"\\{char}" if char in r"\^$.|?*+()[]{}/-" else char


ANY_CHARACTER_IN_JSON = in_json(complement([]), "")
