"""The rows of a table on the screen. The cursor stays on the thing that it is on, whatever comes and goes above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from .table import Order, Row, Table


class Grid(DataTable[Text]):
    """Draws what has changed, and nothing else: the terminal may be far away."""

    BINDINGS: ClassVar = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    _of: Table
    _ids: tuple[str, ...] = ()
    _wanted: str = ""

    @property
    def current(self) -> str:
        """Which thing the cursor is on; in an empty table where it is going to be."""
        return self._ids[self.cursor_row] if self.cursor_row < len(self._ids) else self._wanted

    def begin(self, table: Table, order: Order, cursor: str) -> None:
        """Show the columns of a table, still without rows; the cursor is going to be on this thing."""
        self._of, self._ids, self._wanted = table, (), cursor
        self.clear(columns=True)
        for number, column in enumerate(table.columns):
            is_descending = column.is_number != order.is_reversed
            mark = "" if order.column != number else "▼" if is_descending else "▲"
            title = Text(column.title + mark, justify="right" if column.is_number else "left")
            self.add_column(title, width=title.cell_len)

    def draw(self, rows: Sequence[Row]) -> None:
        """Show these rows. Lines of the screen are no things: what they show is changed in place."""
        current, place = self.current, self.cursor_row
        ids = tuple(self._of.id_of(row) for row in rows)
        cells_of_rows = [[column.cell(row) for column in self._of.columns] for row in rows]
        # Textual would measure when it has nothing else to do, and keep lines that it drew before that.
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
                    self.update_cell_at(at, cell, update_width=True)  # of the scrolled area
        self._ids, self._wanted = ids, current
        wanted = ids.index(current) if current in ids else max(0, min(place, len(ids) - 1))
        if wanted != self.cursor_row:
            self.move_cursor(row=wanted, animate=False)
