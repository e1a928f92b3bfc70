"""The connections of a dashboard, and the one reader of Redis for all tabs.

The connections are opened by the dashboard's lifespan or, if an app has mounted it, by the first request. The reader
reads once a second, and renders each live part once for all tabs that show it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from redis.exceptions import RedisError

from ...producer.control.secret_keys import Role
from ...producer.control.usage import Prices
from ...producer.sse import encode_event
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.process.log import get_logger
from ...shared.shards import ShardsArgument
from ..views.access import Access
from ..views.page import Page
from ..views.source import PageSnapshot, Source
from .render import Renderer

INTERVAL_S = 1.0
# Then the tab reconnects and is authenticated again.
MAX_STREAM_S = 60.0
log = get_logger(__name__)


class DashboardRuntime:
    """Owner of ``Source`` and ``Watcher``, which are opened in the event loop that serves the pages. It also reports
    this process to the deployment.

    Args:
        options: reported options, as of ``ProcessRecord``.
        prices: as of ``dashboard``.
    """

    def __init__(
        self,
        redis_url: str,
        shards: ShardsArgument,
        connection: CommandConnection,
        keys: Keys,
        renderer: Renderer,
        options: dict[str, str],
        prices: Prices | None,
    ) -> None:
        self.source = Source(redis_url, connection, keys, shards, prices)
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


@dataclass(frozen=True)
class Topic:
    """A page with its query, role and root path. Tabs with equal topics get the same bytes."""

    page: Page
    params: tuple[tuple[str, str], ...]
    role: Role
    sees_contents: bool
    root: str


class _Feed:
    """The newest bytes of a topic, and the number of tabs that show it."""

    def __init__(self) -> None:
        self.num_tabs = 0
        self.version = 0
        self.html = ""
        self.event = b""
        self.changed = asyncio.Event()

    def publish(self, html: str) -> None:
        if html == self.html:
            return
        self.html, self.event = html, encode_event(html)
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()


class Watcher:
    """Reader that renders all topics shown in tabs once every ``interval_s``."""

    def __init__(self, source: Source, renderer: Renderer, *, interval_s: float = INTERVAL_S) -> None:
        self._source = source
        self._renderer = renderer
        self._interval_s = interval_s
        self._feeds: dict[Topic, _Feed] = {}
        self._reading: asyncio.Task[None] | None = None
        self.num_ticks = 0
        self.num_renders = 0

    @property
    def num_tabs(self) -> int:
        return sum(feed.num_tabs for feed in self._feeds.values())

    async def follow(self, topic: Topic) -> AsyncGenerator[bytes]:
        """Yield the events for a tab that shows ``topic``, for at most ``MAX_STREAM_S``; the tab then reconnects."""
        feed = self._feeds.setdefault(topic, _Feed())
        feed.num_tabs += 1
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_repeatedly())
        deadline = asyncio.get_running_loop().time() + MAX_STREAM_S
        sent_version = 0
        try:
            while asyncio.get_running_loop().time() < deadline:
                changed = feed.changed
                if feed.version > sent_version:
                    sent_version = feed.version
                    yield feed.event
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
        finally:
            feed.num_tabs -= 1
            if not feed.num_tabs and self._feeds.get(topic) is feed:
                del self._feeds[topic]

    async def tick(self) -> None:
        """Read once and publish what changed."""
        self.num_ticks += 1
        snapshot = PageSnapshot(self._source)
        try:
            await asyncio.gather(
                *(self._renew_feed(snapshot, topic, feed) for topic, feed in list(self._feeds.items()))
            )
        finally:
            await snapshot.close()

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read_repeatedly(self) -> None:
        loop = asyncio.get_running_loop()
        while self._feeds:
            next_at = loop.time() + self._interval_s
            await self.tick()
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    async def _renew_feed(self, snapshot: PageSnapshot, topic: Topic, feed: _Feed) -> None:
        params = dict(topic.params)
        access = Access("", topic.role, topic.sees_contents)
        try:
            view = await topic.page.read(snapshot, params, access)
            self.num_renders += 1
            feed.publish(self._renderer.live(topic.page, view, params, access, topic.root))
        except (PenstockError, RedisError) as error:
            feed.publish(self._renderer.plain("parts/trouble", topic.root, message=str(error)))
        except Exception:
            # A page that fails must not end the streams of the others.
            log.exception("dashboard_page_failed", page=topic.page.name)
            message = "this page cannot be shown; the dashboard's log has the reason"
            feed.publish(self._renderer.plain("parts/trouble", topic.root, message=message))
