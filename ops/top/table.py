"""What a table of ``penstock top`` is: rows of a page in columns, what can be done to a row, and where it leads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from ..views.page import Action, Page, View
from ..views.words import plain

Row = Mapping[str, Any]
# Longer cells are cut; the whole text stands in the details.
MAX_CELL_CHARS = 60
_BREAKS = dict.fromkeys(map(ord, "\t\n\r"), " ")


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        key: of the page's row.
        show: makes text of a value that is not None.
        is_number: it stands on the right, and sorting begins with the largest.
    """

    title: str
    key: str
    show: Callable[[Any], str] = str
    is_number: bool = False

    def text(self, row: Row) -> str:
        """The cell of a row, as one line without what could move the cursor or turn the line."""
        value = row[self.key]
        text = "-" if value is None or value == "" else self.show(value)
        text = plain(text.translate(_BREAKS))
        return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"

    def cell(self, row: Row) -> Text:
        """The cell as it is shown: never read as markup."""
        return Text(self.text(row), justify="right" if self.is_number else "left", no_wrap=True)


@dataclass(frozen=True)
class Choice:
    """One answer to a question: its key, what it means, and the form that is sent."""

    key: str
    word: str
    form: Mapping[str, str]


@dataclass(frozen=True)
class Offer:
    """A change that is made when the question is answered. What destroys also wants its target typed."""

    action: Action
    question: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Move:
    """A key that changes something.

    Args:
        offer: gets the row under the cursor, None in an empty table, and what the page has read; returns None where
            there is nothing to change.
    """

    key: str
    word: str
    offer: Callable[[Row | None, View], Offer | None]


@dataclass(frozen=True)
class Detail:
    """What a row tells when it is opened: a page of its own, read once a second as well."""

    page: Page
    params: Mapping[str, str]
    text: Callable[[View], Text]


@dataclass(frozen=True)
class Jump:
    """Another table that a row leads to, about this model and with this filter."""

    table: str
    model: str
    filter: str = ""


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        identity: keys of the row that say which thing it is, so that the cursor stays on it.
        headline: what stands above: lines of text.
        opens: where Enter leads.
        has_model: whether it is about one model, the one that was chosen.
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
        """Which thing a row is about."""
        return "\n".join(str(row[key]) for key in self.identity)


@dataclass(frozen=True)
class Order:
    """By which column rows are put in order; as the page has them when None."""

    column: int | None = None
    is_reversed: bool = False

    def next(self, num_columns: int) -> Order:
        """The one after this: by the next column, after the last one as the page has it."""
        after = 0 if self.column is None else self.column + 1
        return Order(after if after < num_columns else None)

    def turned(self) -> Order:
        """The other way round."""
        return Order(self.column, not self.is_reversed)


def parse_filter(text: str, page: Page) -> tuple[dict[str, str], str]:
    """Return what of a filter the page is asked for, as ``state=failed``, and the text that rows must hold."""
    params: dict[str, str] = {}
    words: list[str] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals and value and name in page.query:
            params[name] = value
        else:
            words.append(word)
    return params, " ".join(words)


def arranged(table: Table, rows: Sequence[Row], wanted: str, order: Order) -> list[Row]:
    """The rows that hold a text in one of their cells, in order. What is not known comes last."""
    found = [row for row in rows if _holds(table, row, wanted.casefold())]
    if order.column is not None:
        column = table.columns[order.column]
        is_descending = column.is_number != order.is_reversed
        known = [row for row in found if row[column.key] is not None]
        known.sort(key=lambda row: _sortable(row[column.key]), reverse=is_descending)
        return known + [row for row in found if row[column.key] is None]
    return found[::-1] if order.is_reversed else found


def _holds(table: Table, row: Row, wanted: str) -> bool:
    return not wanted or any(wanted in column.text(row).casefold() for column in table.columns)


def _sortable(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value).casefold()
