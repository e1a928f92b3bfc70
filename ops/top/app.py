"""The application ``penstock top``: one reader, two screens, and changes that must be confirmed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from redis.exceptions import RedisError
from rich.text import Text
from textual.app import App
from textual.binding import Binding

from ...shared.errors import PenstockError
from ..views.access import Access
from ..views.page import Action, ActionContext
from ..views.source import Source
from ..views.words import plain
from .dialogs import Chooser, ConfirmDialog, Help, TypeToConfirm, help_text
from .reader import Reader, clock
from .screens import ChangeRequested, DetailScreen, PageChanged, PageScreen, RowOpened, TablesScreen
from .table import Choice, Jump, Offer
from .tables import TABLES, TENANTS

INTERVAL_S = 1.0


class Top(App[None]):
    """Terminal application that shows a deployment, and changes it as far as the role permits.

    Args:
        model: initial model of the tables of one model; empty for the first model.
        redis_url: URL of Redis to show, without a password.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("q", "quit", show=False),
        Binding("question_mark", "help", show=False),
        Binding("m", "choose", show=False),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #head, #tabs, #keys { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #note { height: auto; min-height: 1; max-height: 4; }
    #headline { height: auto; max-height: 6; margin-top: 1; }
    #table { height: 1fr; margin-top: 1; background: ansi_default; color: ansi_default;
             scrollbar-size-horizontal: 0; scrollbar-size-vertical: 1; }
    #table > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold underline; }
    #table > .datatable--cursor { background: ansi_blue; color: ansi_bright_white; text-style: bold; }
    #details { height: 1fr; margin-top: 1; background: ansi_default; }
    #filter { height: 1; }
    ModalScreen { align: center middle; }
    .box { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round; padding: 0 1; }
    .question { text-style: bold; }
    """

    def __init__(self, source: Source, access: Access, *, model: str = "", redis_url: str = "") -> None:
        super().__init__(ansi_color=True)
        # No animations, because the terminal may be behind a slow connection.
        self.animation_level = "none"
        self._source = source
        self._access = access
        self._redis_url = redis_url
        self._reader = Reader(source, access)
        self._tables = TablesScreen(TABLES, model)
        self._last_message = ""

    def on_mount(self) -> None:
        self.push_screen(self._tables)
        self.set_interval(INTERVAL_S, self._draw_head)

    def on_page_changed(self, _: PageChanged) -> None:
        self._restart_reading()

    def on_row_opened(self, message: RowOpened) -> None:
        self.push_screen(DetailScreen(message.detail, message.table, message.row), lambda _: self._restart_reading())
        self._restart_reading()

    def on_change_requested(self, message: ChangeRequested) -> None:
        offer = message.move.offer(message.row, message.view)
        if offer is None:
            self._show_message("there is nothing to change")
        elif not self._access.role.covers(offer.action.role):
            self._show_message(f"this needs the role {offer.action.role}; yours is {self._access.role}")
        else:
            self.push_screen(ConfirmDialog(offer), lambda choice: self._on_choice(offer, choice))

    def action_help(self) -> None:
        self.push_screen(Help(help_text()))

    def action_choose(self) -> None:
        self.run_worker(self._choose, group="choose", exclusive=True)

    async def _choose(self) -> None:
        names = await self._reader.models()
        if names:
            self.push_screen(Chooser("tenants of which model?", names), self._on_model)
        else:
            self._show_message("no models: no worker has served on this Redis yet")

    def _on_model(self, name: str | None) -> None:
        if name is not None:
            while self.screen is not self._tables:
                self.pop_screen()
            self._tables.jump(Jump(TENANTS.name, name))

    def _on_choice(self, offer: Offer, choice: Choice | None) -> None:
        action = offer.action
        if choice is None:
            self._show_message("nothing was done")
        elif action.confirm:
            self.push_screen(TypeToConfirm(choice.form[action.confirm]), lambda ok: self._on_typed(action, choice, ok))
        else:
            self._start_change(action, choice.form)

    def _on_typed(self, action: Action, choice: Choice, is_right: bool | None) -> None:
        if is_right:
            self._start_change(action, choice.form)
        else:
            self._show_message("nothing was done")

    def _start_change(self, action: Action, form: Mapping[str, str]) -> None:
        self._show_message("in progress …")
        self.run_worker(partial(self._run_change, action, form), group="changes")

    async def _run_change(self, action: Action, form: Mapping[str, str]) -> None:
        try:
            self._show_message(await action.do(ActionContext(self._source, form, self._access)))
        except (PenstockError, RedisError) as error:
            self._show_message(f"nothing was done: {error}")
        finally:
            self._source.clear_cache()
            self._restart_reading()

    def _restart_reading(self) -> None:
        """Read the current page now, and then once a second."""
        self.run_worker(self._read_repeatedly, group="look", exclusive=True)

    async def _read_repeatedly(self) -> None:
        while True:
            screen = self._current_screen()
            request = screen.request
            view = await self._reader.read(*request)
            # Another table may have been chosen meanwhile.
            if view is not None and screen.request == request:
                screen.show(view)
            self._draw_head()
            await asyncio.sleep(INTERVAL_S)

    def _current_screen(self) -> PageScreen:
        """Return the screen below any dialogs."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, PageScreen)), self._tables)

    def _show_message(self, words: str) -> None:
        self._last_message = f"{clock(time.time())}: {words}"
        self._draw_head()

    def _draw_head(self) -> None:
        stale = self._reader.staleness_reason()
        head = Text()
        head.append(" penstock top ", "reverse bold")
        head.append(f" {plain(self._redis_url)}  {clock(time.time())}")
        note = Text(plain(stale), "bold red") if stale else Text(plain(self._last_message), "bold")
        self._current_screen().show_head(head, note)
