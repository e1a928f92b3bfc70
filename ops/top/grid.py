"""The rows of a table on the screen. The cursor stays on the same item when rows above it come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from .table import Order, Row, Table


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
