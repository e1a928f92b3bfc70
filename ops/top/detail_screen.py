"""Screen with the details of a request, an engine or a parked request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from ..views.page import Page, View
from .page_screen import ChangeRequested, PageScreen
from .table import Detail, Row, Table


class DetailScreen(PageScreen):
    """The details of one row."""

    BINDINGS: ClassVar = [
        Binding("escape,backspace,h", "leave", show=False),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
    ]

    def __init__(self, detail: Detail, table: Table, row: Row) -> None:
        super().__init__()
        self._detail = detail
        self._table = table
        self._row = row
        self._view: View = {"rows": [row]}
        self._text = Static("reading …", id="text")
        self._scroller = VerticalScroll(self._text, id="details")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._scroller
        yield self._note
        moves = "".join(f"{move.key} {move.word}  " for move in self._table.moves)
        yield Static(Text(moves + "Escape back  q quit", "dim"), id="keys")

    @property
    def request(self) -> tuple[Page, Mapping[str, str]]:
        return self._detail.page, self._detail.params

    def show(self, view: View) -> None:
        if self._detail.page is self._table.page:
            same = [row for row in view["rows"] if self._table.id_of(row) == self._table.id_of(self._row)]
            self._view, self._row = view, same[0] if same else self._row
        self._text.update(self._detail.text(view))

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_down(self) -> None:
        self._scroller.scroll_down(animate=False)

    def action_up(self) -> None:
        self._scroller.scroll_up(animate=False)

    def on_key(self, event: events.Key) -> None:
        move = next((move for move in self._table.moves if move.key == event.character), None)
        if move is not None:
            event.stop()
            self.post_message(ChangeRequested(move, self._row, self._view))
