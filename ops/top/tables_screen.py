"""Screen of the tables, which shows one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Input, Static

from ..views.page import Page, View
from ..views.words import plain
from .grid import Grid
from .page_screen import ChangeRequested, PageChanged, PageScreen, RowOpened
from .table import Jump, Order, Row, Table, arranged, parse_filter

KEYS_HINT = "? help  / filter  s sort  m model  q quit"


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
