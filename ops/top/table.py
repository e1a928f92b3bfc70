"""Tables of ``penstock top`` as values: columns of a page's rows, changes to a row, and where Enter leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from ..views.page import Action, Page, View
from ..views.words import plain

Row = Mapping[str, Any]
# Longer cells are truncated; the details show the whole text.
MAX_CELL_CHARS = 60
_BREAKS = dict.fromkeys(map(ord, "\t\n\r"), " ")


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        key: key in the page's row.
        show: formats a value that is not None.
        is_number: whether the column is aligned to the right and sorted from the largest.
    """

    title: str
    key: str
    show: Callable[[Any], str] = str
    is_number: bool = False

    def text(self, row: Row) -> str:
        """Return the cell of a row as one line, without characters that move the cursor or change the direction."""
        value = row[self.key]
        text = "-" if value is None or value == "" else self.show(value)
        text = plain(text.translate(_BREAKS))
        return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"

    def cell(self, row: Row) -> Text:
        """Return the cell to show, never interpreted as markup."""
        return Text(self.text(row), justify="right" if self.is_number else "left", no_wrap=True)


@dataclass(frozen=True)
class Choice:
    """An answer to a question: its key, its label, and the form to send."""

    key: str
    word: str
    form: Mapping[str, str]


@dataclass(frozen=True)
class Offer:
    """A change with its question. Destructive changes also require typing their target."""

    action: Action
    question: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Move:
    """A key for a change.

    Args:
        offer: function of the row under the cursor (None in an empty table) and the page's values; returns None if
            nothing can be changed.
    """

    key: str
    word: str
    offer: Callable[[Row | None, View], Offer | None]


@dataclass(frozen=True)
class Detail:
    """The page with the details of a row, also read once a second."""

    page: Page
    params: Mapping[str, str]
    text: Callable[[View], Text]


@dataclass(frozen=True)
class Jump:
    """Another table to open, with a model and a filter."""

    table: str
    model: str
    filter: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        identity: keys of the row that identify its item, so that the cursor stays on it.
        headline: returns the lines of text above the table.
        opens: returns where Enter leads.
        has_model: whether the table shows one model, the selected one.
    """

    name: str
    page: Page
    columns: tuple[Column, ...]
    identity: tuple[str, ...]
    headline: Callable[[View], Sequence[str]]
    opens: Callable[[Row, View], Detail | Jump]
    moves: tuple[Move, ...] = field(default=())
    has_model: bool = False

    def id_of(self, row: Row) -> str:
        """Return the id of a row's item."""
        return "\n".join(str(row[key]) for key in self.identity)


@dataclass(frozen=True)
class Order:
    """Column by which rows are sorted; None for the order of the page."""

    column: int | None = None
    is_reversed: bool = False

    def next(self, num_columns: int) -> Order:
        """Return the next order: by the next column; after the last column, the order of the page."""
        after = 0 if self.column is None else self.column + 1
        return Order(after if after < num_columns else None)

    def turned(self) -> Order:
        """Return the reversed order."""
        return Order(self.column, not self.is_reversed)


def parse_filter(text: str, page: Page) -> tuple[dict[str, str], str]:
    """Split a filter into parameters of the page, as ``state=failed``, and the text that rows must contain."""
    params: dict[str, str] = {}
    words: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals and value and name in page.query:
            params[name] = value
        else:
            words.append(word)
    return params, " ".join(words)


def arranged(table: Table, rows: Sequence[Row], search: str, order: Order) -> list[Row]:
    """Return the rows that contain ``search`` in one of their cells, sorted. Unknown values come last."""
    matching = [row for row in rows if _contains(table, row, search.casefold())]
    if order.column is not None:
        column = table.columns[order.column]
        is_descending = column.is_number != order.is_reversed
        known_rows = [row for row in matching if row[column.key] is not None]
        known_rows.sort(key=lambda row: _sortable(row[column.key]), reverse=is_descending)
        return known_rows + [row for row in matching if row[column.key] is None]
    return matching[::-1] if order.is_reversed else matching


def _contains(table: Table, row: Row, search: str) -> bool:
    return not search or any(search in column.text(row).casefold() for column in table.columns)


def _sortable(value: Any) -> tuple[bool, Any]:
    """Return a key that orders numbers before texts, so that a column with both can be sorted."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else str(value).casefold()
