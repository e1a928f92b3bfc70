"""Notice on standard error why a command waits, if no reply arrives for a while and no engine can answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ...producer import Client
from ...shared.errors import EngineDeadError, PenstockError
from ...shared.process.waiting import wait_at_most

SILENCE_S = 2.0


class WaitingNotice:
    """Watcher of the requests of one command for ``model``. Call ``heard`` with each reply to one of them."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self._model = model
        self._news = asyncio.Event()

    def heard(self) -> None:
        self._news.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block runs."""
        watcher = asyncio.create_task(self._watch_for_silence())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch_for_silence(self) -> None:
        is_announced = False
        while True:
            self._news.clear()
            await wait_at_most(SILENCE_S, self._news.wait())
            if self._news.is_set():
                if is_announced:
                    _print_notice("an engine has taken it up")
                is_announced = False
            elif not is_announced and (cause := await self._cause()):
                _print_notice(f"{cause}; the request waits in line; Ctrl-C cancels it")
                is_announced = True

    async def _cause(self) -> str:
        """Return why no reply arrives; "" if an engine works on it, or the cause is unknown."""
        try:
            name = (await self._client.get_model_config(self._model)).model
            if await self._client.is_paused(name):
                return f"the queue of {name!r} is paused"
            with suppress(EngineDeadError):
                await self._client.check_health(name)
                return ""
        except PenstockError:
            # For example, Redis is unreachable. The request itself reports that.
            return ""
        return f"no engine serves {name!r} now"


def _print_notice(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
