"""What the screens of ``penstock top`` have in common: a page that they show, and what they tell the application."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from ..views.page import Page, View
from .table import Detail, Move, Row, Table


class Wanted(Message):
    """Somebody has pressed the key of a change."""

    def __init__(self, move: Move, row: Row | None, view: View) -> None:
        super().__init__()
        self.move = move
        self.row = row
        self.view = view


class Turned(Message):
    """Something else is to be read now."""


class Opened(Message):
    """A row is to be shown by itself."""

    def __init__(self, detail: Detail, table: Table, row: Row) -> None:
        super().__init__()
        self.detail = detail
        self.table = table
        self.row = row


class Looking(Screen[None]):
    """A screen whose figures the application reads once a second.

    It holds its widgets itself: it may be told something before they are on the screen, and after they have left it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._head = Static(id="head")
        self._note = Static(id="note")

    @property
    def asks(self) -> tuple[Page, Mapping[str, str]]:
        """The page to read, and its query."""
        raise NotImplementedError

    def show(self, view: View) -> None:
        """Show what was read."""
        raise NotImplementedError

    def tell(self, head: Text, note: Text) -> None:
        """Show where one is, and what has happened."""
        self._head.update(head)
        self._note.update(note)
