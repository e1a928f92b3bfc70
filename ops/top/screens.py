"""The screens of ``penstock top``: the tables, one at a time, and the details of one request or engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Input, Static

from ..views.page import Page, View
from ..views.words import plain
from .table import Detail, Jump, Move, Order, Row, Table, arranged, parse_filter

KEYS_HINT = "? help  / filter  s sort  m model  q quit"


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


@dataclass
class TableView:
    """Filter, order and cursor of a table, remembered while another table is shown."""

    filter: str = ""
    order: Order = field(default_factory=Order)
    cursor: str = ""


class TablesScreen(PageScreen):
    """Screen with one of several tables."""

    BINDINGS: ClassVar = [
        *(Binding(str(number), f"table({number - 1})", show=False) for number in range(1, 10)),
        Binding("tab", "next(1)", show=False),
        Binding("shift+tab", "next(-1)", show=False),
        Binding("slash", "filter", show=False),
        Binding("s", "sort", show=False),
        Binding("S", "turn", show=False),
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
        Binding("escape", "leave", show=False),
    ]

    def __init__(self, tables: Sequence[Table], model: str) -> None:
        super().__init__()
        self.model = model
        self._tables = {table.page.name: table for table in tables}
        self._table_views = {name: TableView() for name in self._tables}
        self._table = tables[0]
        self._view: View | None = None
        self._rows: list[Row] = []
        self._tabs, self._headline, self._keys = Static(id="tabs"), Static(id="headline"), Static(id="keys")
        self._grid = Grid(id="table", cursor_type="row")
        self._box = Input(id="filter", compact=True, placeholder="text, or name=value as state=failed")

    def compose(self) -> ComposeResult:
        yield from (self._head, self._tabs, self._headline, self._grid, self._box, self._note, self._keys)

    def on_mount(self) -> None:
        self._box.display = False
        self._switch_to(self._table)

    @property
    def request(self) -> tuple[Page, Mapping[str, str]]:
        page = self._table.page
        params, _ = parse_filter(self._now.filter, page)
        if self._table.has_model and self.model:
            params = {"model": self.model, **params}
        return page, params

    def show(self, view: View) -> None:
        self._view = view
        self._draw()

    def jump(self, to: Jump) -> None:
        """Show another table, with the model and filter of ``to``."""
        self.model = to.model
        target = next(table for table in self._tables.values() if table.name == to.table)
        self._table_views[target.page.name] = TableView(filter=to.filter)
        self._switch_to(target)

    def action_table(self, index: int) -> None:
        if index < len(self._tables):
            self._switch_to(list(self._tables.values())[index])

    def action_next(self, step: int) -> None:
        tables = list(self._tables.values())
        self._switch_to(tables[(tables.index(self._table) + step) % len(tables)])

    def action_filter(self) -> None:
        self._box.value = self._now.filter
        self._box.display = True
        self._box.focus()

    def action_leave(self) -> None:
        """Close the filter; if it is closed, clear it."""
        if self._box.display:
            self._close_filter()
        else:
            self._filter("")

    def action_sort(self) -> None:
        self._order(self._now.order.next(len(self._table.columns)))

    def action_turn(self) -> None:
        self._order(self._now.order.turned())

    def action_down(self) -> None:
        self._grid.action_cursor_down()

    def action_up(self) -> None:
        self._grid.action_cursor_up()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._filter(event.value.strip())
        self._close_filter()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        row = self._row()
        if row is None or self._view is None:
            return
        to = self._table.opens(row, self._view)
        if isinstance(to, Jump):
            self.jump(to)
        else:
            self.post_message(RowOpened(to, self._table, row))

    def on_key(self, event: events.Key) -> None:
        move = next((move for move in self._table.moves if move.key == event.character), None)
        if move is not None and self._view is not None:
            event.stop()
            self.post_message(ChangeRequested(move, self._row(), self._view))

    @property
    def _now(self) -> TableView:
        return self._table_views[self._table.page.name]

    def _row(self) -> Row | None:
        """Return the row under the cursor."""
        current = self._grid.current
        return next((row for row in self._rows if self._table.id_of(row) == current), None)

    def _order(self, order: Order) -> None:
        self._now.order, self._now.cursor = order, self._grid.current
        self._draw(is_new=True)

    def _filter(self, text: str) -> None:
        if text != self._now.filter:
            self._now.filter, self._now.cursor = text, self._grid.current
            self._draw(is_new=True)
            self.post_message(PageChanged())

    def _close_filter(self) -> None:
        self._box.display = False
        self._grid.focus()

    def _switch_to(self, table: Table) -> None:
        self._now.cursor = self._grid.current
        self._table, self._view, self._rows = table, None, []
        words = Text()
        for number, tab in enumerate(self._tables.values(), 1):
            words.append(f" {number} {tab.name} ", "reverse" if tab is table else "")
        self._tabs.update(words)
        moves = "".join(f"{move.key} {move.word}  " for move in table.moves)
        self._keys.update(Text(moves + KEYS_HINT, "dim"))
        self._draw(is_new=True)
        self._grid.focus()
        self.post_message(PageChanged())

    def _draw(self, *, is_new: bool = False) -> None:
        view, now = self._view, self._now
        _, search = parse_filter(now.filter, self._table.page)
        self._rows = arranged(self._table, view["rows"], search, now.order) if view is not None else []
        self._draw_headline()
        if is_new:
            self._grid.begin(self._table, now.order, now.cursor)
        self._grid.draw(self._rows)

    def _draw_headline(self) -> None:
        if self._view is None:
            lines = ["reading …"]
        else:
            lines = [*self._table.headline(self._view)]
            if self._now.filter:
                lines.append(f"filter {self._now.filter}: {len(self._rows)} shown; Escape shows all")
        self._headline.update(Text(plain("\n".join(lines))))


class Grid(DataTable[Text]):
    """A table that draws only changed cells, because the terminal may be behind a slow connection."""

    BINDINGS: ClassVar = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    _shown_table: Table
    _ids: tuple[str, ...] = ()
    _next_id: str = ""

    @property
    def current(self) -> str:
        """Id of the item under the cursor; in an empty table, of the item where the cursor will be."""
        return self._ids[self.cursor_row] if self.cursor_row < len(self._ids) else self._next_id

    def begin(self, table: Table, order: Order, cursor: str) -> None:
        """Show the columns of a table without rows. The cursor will be on the item ``cursor``."""
        self._shown_table, self._ids, self._next_id = table, (), cursor
        self.clear(columns=True)
        for number, column in enumerate(table.columns):
            is_descending = column.is_number != order.is_reversed
            mark = "" if order.column != number else "▼" if is_descending else "▲"
            title = Text(column.title + mark, justify="right" if column.is_number else "left")
            self.add_column(title, width=title.cell_len)

    def draw(self, rows: Sequence[Row]) -> None:
        """Show these rows. Lines of the screen are reused: their cells are changed in place."""
        current, place = self.current, self.cursor_row
        ids = tuple(self._shown_table.id_of(row) for row in rows)
        cells_of_rows = [[column.cell(row) for column in self._shown_table.columns] for row in rows]
        # Textual would measure widths when idle, and keep lines drawn before.
        for index, drawn in enumerate(self.ordered_columns):
            drawn.width = max(drawn.label.cell_len, *(cells[index].cell_len for cells in cells_of_rows), 1)
        for number in range(len(rows), len(self._ids)):
            self.remove_row(str(number))
        for number, cells in enumerate(cells_of_rows):
            if number >= len(self._ids):
                self.add_row(*cells, key=str(number))
                continue
            for index, cell in enumerate(cells):
                at = Coordinate(number, index)
                if self.get_cell_at(at) != cell:
                    self.update_cell_at(at, cell, update_width=True)  # updates the scrolled area
        self._ids, self._next_id = ids, current
        target = ids.index(current) if current in ids else max(0, min(place, len(ids) - 1))
        if target != self.cursor_row:
            self.move_cursor(row=target, animate=False)


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
