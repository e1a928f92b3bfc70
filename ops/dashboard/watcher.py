"""One reader of Redis for all tabs: a look a second, each live part rendered once, the same bytes to whoever shows it.

It looks only while somebody does. A tab that is slow gets the newest bytes and misses those before; a hidden tab closes
its stream by itself. So the cost is that of the different things on show, not of the tabs that show them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from redis.exceptions import RedisError

from ...producer.operator_keys import Role
from ...producer.sse import encode_event
from ...shared.errors import PenstockError
from ...shared.process.log import get_logger
from ..views.access import Access
from ..views.page import Page
from ..views.source import Moment, Source
from .render import Renderer

INTERVAL_S = 1.0
# Then the tab comes again, and is asked anew who it is.
MAX_STREAM_S = 60.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Topic:
    """What tabs show: a page with its query, for who may do and see the same, under the same address."""

    page: Page
    params: tuple[tuple[str, str], ...]
    role: Role
    sees_contents: bool
    root: str


class _Feed:
    """The newest bytes of a topic, and how many tabs wait for newer ones."""

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
    """Looks once every ``interval_s`` for all topics that somebody shows."""

    def __init__(self, source: Source, renderer: Renderer, *, interval_s: float = INTERVAL_S) -> None:
        self._source = source
        self._renderer = renderer
        self._interval_s = interval_s
        self._feeds: dict[Topic, _Feed] = {}
        self._looking: asyncio.Task[None] | None = None
        self.num_ticks = 0
        self.num_renders = 0

    @property
    def num_tabs(self) -> int:
        return sum(feed.num_tabs for feed in self._feeds.values())

    async def follow(self, topic: Topic) -> AsyncGenerator[bytes]:
        """Iterate over the events for a tab that shows ``topic``, for a while; it then comes again."""
        feed = self._feeds.setdefault(topic, _Feed())
        feed.num_tabs += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        deadline = asyncio.get_running_loop().time() + MAX_STREAM_S
        seen = 0
        try:
            while asyncio.get_running_loop().time() < deadline:
                changed = feed.changed
                if feed.version > seen:
                    seen = feed.version
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
        """Look once and publish what has changed."""
        self.num_ticks += 1
        moment = Moment(self._source)
        try:
            await asyncio.gather(*(self._renew(moment, topic, feed) for topic, feed in list(self._feeds.items())))
        finally:
            await moment.close()

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._feeds:
            next_at = loop.time() + self._interval_s
            await self.tick()
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    async def _renew(self, moment: Moment, topic: Topic, feed: _Feed) -> None:
        params = dict(topic.params)
        access = Access("", topic.role, topic.sees_contents)
        try:
            view = await topic.page.read(moment, params, access)
            self.num_renders += 1
            feed.publish(self._renderer.live(topic.page, view, params, access, topic.root))
        except (PenstockError, RedisError) as error:
            feed.publish(self._renderer.plain("trouble", topic.root, message=str(error)))
        except Exception:
            # One page that fails must not end those of all others.
            log.exception("dashboard_page_failed", page=topic.page.name)
            message = "this page cannot be shown; the dashboard's log says why"
            feed.publish(self._renderer.plain("trouble", topic.root, message=message))
