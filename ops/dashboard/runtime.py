"""The connections of a dashboard, opened by its lifespan or, if an app has mounted it, by the first request."""

from __future__ import annotations

import asyncio

from ...shared.connection import CommandConnection
from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.keys import Keys
from ...shared.shards import ShardsArgument
from ..views.source import Source
from .render import Renderer
from .watcher import Watcher


class DashboardRuntime:
    """Owner of ``Source`` and ``Watcher``, which are opened in the event loop that serves the pages. It also reports
    this process to the deployment.

    Args:
        options: reported options, as of ``ProcessRecord``.
    """

    def __init__(
        self,
        redis_url: str,
        shards: ShardsArgument,
        connection: CommandConnection,
        keys: Keys,
        renderer: Renderer,
        options: dict[str, str],
    ) -> None:
        self.source = Source(redis_url, connection, keys, shards)
        self.watcher = Watcher(self.source, renderer)
        self.presence = Presence(connection, keys, ProcessKind.DASHBOARD, options)
        self._lock = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """Connect. A second call does nothing.

        Raises:
            RedisUnavailableError, RedisUnsupportedError: as ``Source.open``.
        """
        if self._is_open:
            return
        async with self._lock:
            if not self._is_open:
                await self.source.open()
                self.presence.start()
                self._is_open = True

    async def close(self) -> None:
        """Disconnect. A second call does nothing."""
        self._is_open = False
        await self.presence.leave()
        await self.watcher.close()
        await self.source.close()
