"""Says on standard error why a command waits, once it has heard nothing for a moment and nobody is there to answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ...producer import Client
from ...shared.errors import EngineDeadError, PenstockError

SILENCE_S = 2.0


class WaitingNotice:
    """Watches the requests of one command for ``model``; ``heard`` is called with whatever comes of one of them."""

    def __init__(self, client: Client, model: str | None) -> None:
        self._client = client
        self._model = model
        self._news = asyncio.Event()

    def heard(self) -> None:
        self._news.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch for the block."""
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self) -> None:
        is_told = False
        while True:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await self._news.wait()
            if self._news.is_set():
                if is_told:
                    _tell("an engine has taken it up")
                is_told = False
            elif not is_told and (cause := await self._cause()):
                _tell(f"{cause}; the request waits in line; Ctrl-C cancels it")
                is_told = True

    async def _cause(self) -> str:
        """Why nothing comes; empty if an engine is at it, or nobody can know."""
        try:
            name = (await self._client.get_model_config(self._model)).model
            if await self._client.is_paused(name):
                return f"the queue of {name!r} is paused"
            with suppress(EngineDeadError):
                await self._client.check_health(name)
                return ""
        except PenstockError:
            # Redis is away, say: the request itself has to tell.
            return ""
        return f"no engine serves {name!r} now"


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
