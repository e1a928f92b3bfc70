"""The application ``penstock top``: one reader, two screens, and changes behind a question."""

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
from ..views.page import Act, Action
from ..views.source import Source
from ..views.words import plain
from .detail_screen import DetailScreen
from .dialogs import Chooser, Help, Question, Typed
from .help import help_text
from .looking import Looking, Opened, Turned, Wanted
from .reader import Reader, clock
from .table import Choice, Jump, Offer
from .tables import TABLES, TENANTS
from .tables_screen import TablesScreen

INTERVAL_S = 1.0


class Top(App[None]):
    """Shows the deployment of a source, and changes it as far as the role goes.

    Args:
        model: the one that tables of one model begin with; the first there is if empty.
        where: the address of Redis, without a password.
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
    #behind { height: 1fr; margin-top: 1; background: ansi_default; }
    #filter { height: 1; }
    ModalScreen { align: center middle; }
    .box { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round; padding: 0 1; }
    .question { text-style: bold; }
    """

    def __init__(self, source: Source, access: Access, *, model: str = "", where: str = "") -> None:
        super().__init__(ansi_color=True)
        # A line far away carries what has changed, once.
        self.animation_level = "none"
        self._source = source
        self._access = access
        self._where = where
        self._reader = Reader(source, access)
        self._tables = TablesScreen(TABLES, model)
        self._said = ""

    def on_mount(self) -> None:
        self.push_screen(self._tables)
        self.set_interval(INTERVAL_S, self._tell)

    def on_turned(self, _: Turned) -> None:
        self._look_anew()

    def on_opened(self, message: Opened) -> None:
        self.push_screen(DetailScreen(message.detail, message.table, message.row), lambda _: self._look_anew())
        self._look_anew()

    def on_wanted(self, message: Wanted) -> None:
        offer = message.move.offer(message.row, message.view)
        if offer is None:
            self._say("there is nothing to change")
        elif not self._access.role.covers(offer.action.role):
            self._say(f"this needs the role {offer.action.role}; yours is {self._access.role}")
        else:
            self.push_screen(Question(offer), lambda choice: self._answered(offer, choice))

    def action_help(self) -> None:
        self.push_screen(Help(help_text()))

    def action_choose(self) -> None:
        self.run_worker(self._choose, group="choose", exclusive=True)

    async def _choose(self) -> None:
        names = await self._reader.models()
        if names:
            self.push_screen(Chooser("tenants of which model?", names), self._chosen)
        else:
            self._say("no models: no worker has served here yet")

    def _chosen(self, name: str | None) -> None:
        if name is not None:
            while self.screen is not self._tables:
                self.pop_screen()
            self._tables.jump(Jump(TENANTS.name, name))

    def _answered(self, offer: Offer, choice: Choice | None) -> None:
        action = offer.action
        if choice is None:
            self._say("nothing was done")
        elif action.confirm:
            self.push_screen(Typed(choice.form[action.confirm]), lambda ok: self._confirmed(action, choice, ok))
        else:
            self._start(action, choice.form)

    def _confirmed(self, action: Action, choice: Choice, is_right: bool | None) -> None:
        if is_right:
            self._start(action, choice.form)
        else:
            self._say("nothing was done")

    def _start(self, action: Action, form: Mapping[str, str]) -> None:
        self._say("under way …")
        self.run_worker(partial(self._change, action, form), group="changes")

    async def _change(self, action: Action, form: Mapping[str, str]) -> None:
        try:
            self._say(await action.do(Act(self._source, form, self._access)))
        except (PenstockError, RedisError) as error:
            self._say(f"nothing was done: {error}")
        finally:
            self._source.forget_kept()
            self._look_anew()

    def _look_anew(self) -> None:
        """Read what is on the screen now, and from then on once a second."""
        self.run_worker(self._look, group="look", exclusive=True)

    async def _look(self) -> None:
        while True:
            screen = self._looking()
            asked = screen.asks
            view = await self._reader.read(*asked)
            # Another table may have been chosen meanwhile.
            if view is not None and screen.asks == asked:
                screen.show(view)
            self._tell()
            await asyncio.sleep(INTERVAL_S)

    def _looking(self) -> Looking:
        """The screen below questions."""
        return next((one for one in reversed(self.screen_stack) if isinstance(one, Looking)), self._tables)

    def _say(self, words: str) -> None:
        self._said = f"{clock(time.time())}: {words}"
        self._tell()

    def _tell(self) -> None:
        trouble = self._reader.trouble()
        head = Text()
        head.append(" penstock top ", "reverse bold")
        head.append(f" {plain(self._where)}  {clock(time.time())}")
        note = Text(plain(trouble), "bold red") if trouble else Text(plain(self._said), "bold")
        self._looking().tell(head, note)
