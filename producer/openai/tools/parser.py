"""Takes tool calls out of a model's text as it comes.

The invariant: what comes out depends on the characters alone, not on how they were cut into pieces. Text is held back
only while it may become part of a marker, of the whitespace before one, or of a call whose name is not known yet.
Nothing is lost: a section that turns out to be no call comes back as content, marker included.
"""

from __future__ import annotations

from collections.abc import Collection

from ..markers import len_of_certain
from .call_reader import CallReader
from .formats import CallFormat
from .json_reader import MalformedError, Reader
from .pieces import Content, Piece

_SEPARATORS = " \t\r\n,;"


class ToolCallParser:
    """Parses one text in one format.

    Args:
        names: of the tools that the request offers.
        whole: give out complete calls only; one that is malformed further on is then content from its beginning.
            Without it arguments are given out as they come, and what follows a mistake in them is content.
    """

    def __init__(self, call_format: CallFormat, names: Collection[str] = (), *, whole: bool = False) -> None:
        self._format = call_format
        self._reader = CallReader(whole=whole, names=names if call_format.names_must_match else None)
        self._pieces: list[Piece] = []
        self._text = ""  # what is not settled yet; of a section, all of it
        self._is_section = False
        self._grammar: Reader[None] | None = None  # of the section, once it has a first character
        self._next = 0  # the first character of ``_text`` that the grammar has not seen
        self._may_begin = bool(call_format.first_chars)

    def feed(self, text: str) -> list[Piece]:
        """Take the next text; return what is certain by now."""
        self._text += text
        self._advance()
        return self._take_pieces()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The text has ended; return the rest.

        Args:
            is_cut: by a limit. A call that it cuts is given out as far as it goes, also where whole ones are wanted.
        """
        while self._is_section:
            self._reader.position = len(self._text)
            self._send("", keep_cut=is_cut)
            self._advance()
        if not self._reader.num_calls or self._text.strip():
            self._give_content(len(self._text))
        return self._take_pieces()

    def _advance(self) -> None:
        while self._read_section() if self._is_section else self._find_section():
            pass

    def _find_section(self) -> bool:
        """Give out content; return whether a section begins."""
        if self._may_begin:
            first = self._text.lstrip()[:1]
            if not first:
                return False
            self._may_begin = False
            if first in self._format.first_chars:
                self._begin_section(self._text.index(first))
                return True
        marker = self._format.marker or ""
        start = self._text.find(marker) if marker else -1
        if start < 0:
            self._give_content(len_of_certain(self._text, marker))
            return False
        self._give_content(len(self._text[:start].rstrip()))
        self._begin_section(self._text.index(marker) + len(marker))
        return True

    def _begin_section(self, first: int) -> None:
        """``_text`` is a section from its beginning, its grammar begins at ``first``."""
        self._reader.begin(self._text, first)
        self._is_section, self._grammar, self._next = True, None, first

    def _read_section(self) -> bool:
        """Let the grammar see the rest of the text; return whether the section has ended before that."""
        self._reader.text = self._text
        while self._next < len(self._text):
            self._reader.position = self._next
            self._send(self._text[self._next], keep_cut=False)
            if not self._is_section:
                return True
            self._next += 1
        self._reader.flush()
        return False

    def _send(self, char: str, *, keep_cut: bool) -> None:
        """Send a character, or the end, to the grammar; ends the section if it does not take it."""
        try:
            if self._grammar is None:
                self._grammar = self._format.read_section(self._reader, char)
                next(self._grammar)
            else:
                self._grammar.send(char)
        except StopIteration:
            self._end_section(self._reader.settled)
        except MalformedError:
            self._reader.break_off(keep=keep_cut)
            self._end_section(self._reader.position, is_end=not char)
        else:
            return

    def _end_section(self, end: int, *, is_end: bool = False) -> None:
        """What the section has not settled before ``end`` is content; the search goes on there."""
        self._pieces += self._reader.pieces
        self._reader.pieces = []
        settled = self._reader.settled
        rest = self._text[settled:end]
        is_separator = is_end and settled > 0 and not rest.strip(_SEPARATORS)
        if rest and not is_separator:
            self._pieces.append(Content(rest))
        self._text, self._is_section, self._grammar = self._text[end:], False, None

    def _give_content(self, end: int) -> None:
        if end > 0:
            self._pieces.append(Content(self._text[:end]))
            self._text = self._text[end:]

    def _take_pieces(self) -> list[Piece]:
        pieces = self._pieces + self._reader.pieces
        self._pieces, self._reader.pieces = [], []
        return pieces
