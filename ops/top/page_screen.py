"""Base class of the screens of ``penstock top``, and their messages to the application."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from ..views.page import Page, View
from .table import Detail, Move, Row, Table


class ChangeRequested(Message):
    """The key of a change was pressed."""

    def __init__(self, move: Move, row: Row | None, view: View) -> None:
        super().__init__()
        self.move = move
        self.row = row
        self.view = view


class PageChanged(Message):
    """Another page or query must be read now."""


class RowOpened(Message):
    """The details of a row were requested."""

    def __init__(self, detail: Detail, table: Table, row: Row) -> None:
        super().__init__()
        self.detail = detail
        self.table = table
        self.row = row


class PageScreen(Screen[None]):
    """A screen with a page that the application reads once a second.

    It keeps references to its widgets, because it may be updated before they are mounted and after they are removed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._head = Static(id="head")
        self._note = Static(id="note")

    @property
    def request(self) -> tuple[Page, Mapping[str, str]]:
        """Page to read, and its query."""
        raise NotImplementedError

    def show(self, view: View) -> None:
        """Show the values that were read."""
        raise NotImplementedError

    def show_head(self, head: Text, note: Text) -> None:
        """Show the head line, and the last message."""
        self._head.update(head)
        self._note.update(note)
