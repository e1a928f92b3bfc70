"""Extract tool calls from a model's text as it arrives.

Invariant: the output depends only on the characters, not on how they are split into pieces. Text is held back only
while it may become part of a marker, of the whitespace before one, or of a call whose name is unknown. Nothing is lost:
a section that turns out not to be a call becomes content, including its marker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..reasoning import safe_prefix_len
from .call_reader import CallPiece, CallReader, Content, Piece
from .custom import INPUT
from .formats import CallFormat
from .json_reader import MalformedError, Reader
from .values import escaped

_SEPARATORS = " \t\r\n,;"


class InputParser:
    """Parser of a text that is the input of the custom tool ``name``. The call has it in the argument ``input``."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Piece]:
        """Return the call's part for ``text``."""
        return self._pieces(escaped(text)) if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the call, unless a limit cut its input."""
        return self._pieces("" if is_cut else '"}')

    def _pieces(self, arguments: str) -> list[Piece]:
        name, self._name = self._name, None
        begin = "" if name is None else f'{{"{INPUT}": "'
        return [CallPiece(0, name, begin + arguments)]


class ToolCallParser:
    """Parser of one text in one format.

    Args:
        schemas: JSON schemas of the arguments of the tools that the request offers, by name.
        whole: emit complete calls only; a call that is malformed later on becomes content from its start. Without it,
            arguments are emitted as they arrive, and text after a mistake in them is content.
    """

    def __init__(
        self, call_format: CallFormat, schemas: Mapping[str, Mapping[str, Any]] | None = None, *, whole: bool = False
    ) -> None:
        self._format = call_format
        self._reader = CallReader(whole=whole, schemas=schemas or {}, names_must_match=call_format.names_must_match)
        self._pieces: list[Piece] = []
        self._text = ""  # unsettled text; the whole section if in one
        self._is_section = False
        self._grammar: Reader[None] | None = None  # of the section, after its first character
        self._next = 0  # index in ``_text`` of the grammar's next character
        self._may_begin = bool(call_format.first_chars)

    def feed(self, text: str) -> list[Piece]:
        """Add a piece of text, and return the pieces that are certain by now."""
        self._text += text
        self._advance()
        return self._pop_pieces()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the text, and return the rest.

        Args:
            is_cut: whether a limit ended it. A truncated call is then emitted as far as it goes, even with ``whole``.
        """
        while self._is_section:
            self._reader.position = len(self._text)
            self._send_char("", keep_cut=is_cut)
            self._advance()
        if not self._reader.num_calls or self._text.strip():
            self._emit_content(len(self._text))
        return self._pop_pieces()

    def _advance(self) -> None:
        while self._read_section() if self._is_section else self._find_section():
            pass

    def _find_section(self) -> bool:
        """Emit content, and return whether a section starts."""
        if self._may_begin:
            first = self._text.lstrip()[:1]
            if not first:
                return False
            self._may_begin = False
            if first in self._format.first_chars:
                self._start_section(self._text.index(first))
                return True
        starts = [start for marker in self._format.markers if (start := self._text.find(marker)) >= 0]
        if not starts:
            certain = (safe_prefix_len(self._text, marker) for marker in self._format.markers)
            self._emit_content(min(certain, default=len(self._text)))
            return False
        num_before = len(self._text[: min(starts)].rstrip())
        self._emit_content(num_before)
        self._start_section(min(starts) - num_before)
        return True

    def _start_section(self, first: int) -> None:
        """Start a section with ``_text``, whose grammar starts at ``first``."""
        self._reader.start_section(self._text, first)
        self._is_section, self._grammar, self._next = True, None, first

    def _read_section(self) -> bool:
        """Send the rest of the text to the grammar, and return whether the section ended before its end."""
        self._reader.text = self._text
        while self._next < len(self._text):
            self._reader.position = self._next
            self._send_char(self._text[self._next], keep_cut=False)
            if not self._is_section:
                return True
            self._next += 1
        self._reader.flush()
        return False

    def _send_char(self, char: str, *, keep_cut: bool) -> None:
        """Send a character, or the end, to the grammar. Ends the section if the grammar rejects it."""
        try:
            if self._grammar is None:
                self._grammar = self._format.read_section(self._reader, char)
                next(self._grammar)
            else:
                self._grammar.send(char)
        except StopIteration:
            # A section without a call is content, and the search goes on behind it.
            self._end_section(self._reader.settled or max(self._reader.position, 1))
        except MalformedError:
            self._reader.break_off(keep=keep_cut)
            self._end_section(self._reader.position, is_end=not char)
        else:
            return

    def _end_section(self, end: int, *, is_end: bool = False) -> None:
        """End the section at ``end``; its unsettled text is content. The search continues at ``end``."""
        self._pieces += self._reader.pieces
        self._reader.pieces = []
        settled = self._reader.settled
        rest = self._text[settled:end]
        is_separator = is_end and settled > 0 and not rest.strip(_SEPARATORS)
        if rest and not is_separator:
            self._pieces.append(Content(rest))
        self._text, self._is_section, self._grammar = self._text[end:], False, None

    def _emit_content(self, end: int) -> None:
        if end > 0:
            self._pieces.append(Content(self._text[:end]))
            self._text = self._text[end:]

    def _pop_pieces(self) -> list[Piece]:
        pieces = self._pieces + self._reader.pieces
        self._pieces, self._reader.pieces = [], []
        return pieces
