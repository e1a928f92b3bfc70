"""Dialogs over a table: confirmation, typed confirmation, choice, help with all keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ..views.words import plain
from .table import Choice, Offer
from .tables import TABLES

_BACK: tuple[BindingType, ...] = (Binding("escape", "leave", "back"),)
_KEYS = (
    ("1 … 6, Tab", "models, tenants, requests, engines, dead letter, devices"),
    ("↑ ↓, j k", "select a row; also PageUp, PageDown, Home, End"),
    ("← →", "scroll columns"),
    ("Enter", "details of a row; Escape goes back"),
    ("/", "filter: text in any cell, or name=value for Redis: requests"),
    ("", "state= tenant= band= engine= prefix= since=15m,"),
    ("", "tenants q=, engines and dead letter model="),
    ("s, S", "sort by the next column; reverse the order"),
    ("m", "the tenants of another model"),
    ("?, q", "show these keys; quit"),
)
_WIDTH = 12


def safe(text: str) -> Text:
    """Return text that is never interpreted as markup, with invisible characters escaped."""
    return Text(plain(text))


class ConfirmDialog(ModalScreen[Choice | None]):
    """ConfirmDialog before a change: a key for each answer, n or Escape to cancel."""

    def __init__(self, offer: Offer) -> None:
        super().__init__()
        self._offer = offer

    def compose(self) -> ComposeResult:
        answers = [f"{choice.key}  {choice.word}" for choice in self._offer.choices]
        with Vertical(classes="box"):
            yield Static(safe(self._offer.question), classes="question")
            yield Static(safe("\n".join(["", *answers, "n  no"])))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        for choice in self._offer.choices:
            if event.character == choice.key:
                self.dismiss(choice)
                return
        if event.key in ("n", "escape"):
            self.dismiss(None)


class TypeToConfirm(ModalScreen[bool]):
    """ConfirmDialog that requires typing a word before a destructive change."""

    BINDINGS: ClassVar = [*_BACK]

    def __init__(self, expected: str) -> None:
        super().__init__()
        self._expected = expected

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(safe(f"type {self._expected} to confirm, Escape to cancel"), classes="question")
            yield Input(id="typed", compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value == self._expected)

    def action_leave(self) -> None:
        self.dismiss(False)


class Chooser(ModalScreen[str | None]):
    """Choice of one of several names."""

    BINDINGS: ClassVar = [*_BACK, Binding("j", "down", show=False), Binding("k", "up", show=False)]

    def __init__(self, title: str, names: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._names = names

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(safe(self._title), classes="question")
            yield OptionList(*(Option(safe(name)) for name in self._names))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._names[event.option_index])

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_down(self) -> None:
        self.query_one(OptionList).action_cursor_down()

    def action_up(self) -> None:
        self.query_one(OptionList).action_cursor_up()


class Help(ModalScreen[None]):
    """List of the keys."""

    BINDINGS: ClassVar = [*_BACK, Binding("q,question_mark,enter", "leave", show=False)]

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static(self._text)

    def action_leave(self) -> None:
        self.dismiss(None)


def help_text() -> Text:
    """Return all keys, those of each table last."""
    lines = [("Keys", "")]
    lines += _KEYS
    lines += [("", ""), ("Changes", "each asks first, and is recorded in `penstock audit`")]
    lines += [(table.name, ", ".join(f"{move.key} {move.word}" for move in table.moves)) for table in TABLES]
    return Text("\n".join(f"{keys:<{_WIDTH}}{words}" for keys, words in lines))
