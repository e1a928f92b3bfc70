"""One reader for all tabs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import pytest

from penstock.ops.dashboard import Access, Role, everybody
from penstock.ops.dashboard.runtime import DashboardRuntime, Topic
from penstock.ops.views.pages import PAGES

from ...processes import DEADLINE_S
from ...redis_server import RedisServer
from .conftest import Site

OVERVIEW, QUEUE = PAGES[0], PAGES[1]


def topic(page: object = OVERVIEW, role: Role = Role.VIEWER, **params: str) -> Topic:
    assert isinstance(page, type(OVERVIEW))
    return Topic(page, tuple(sorted(params.items())), role, False, "")


async def runtime_of(site: Site) -> DashboardRuntime:
    runtime = (await site.app(lambda _: None)).state.runtime
    runtime.watcher._interval_s = 0.01  # a test waits for ticks, not for seconds
    return runtime


async def first_of(stream: AsyncGenerator[bytes]) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(stream)


async def until_rendered(runtime: DashboardRuntime, num_pages: int) -> None:
    """Wait for a moment between two looks, at which each has rendered so many pages."""
    async with asyncio.timeout(DEADLINE_S):
        while runtime.watcher.num_renders != num_pages * runtime.watcher.num_ticks:
            await asyncio.sleep(0)


async def test_fifty_tabs_share_one_rendered_page(site: Site) -> None:
    runtime = await runtime_of(site)
    async with AsyncExitStack() as stack:
        tabs = [await stack.enter_async_context(aclosing(runtime.watcher.follow(topic()))) for _ in range(50)]
        events = await asyncio.gather(*map(first_of, tabs))
        assert len(set(events)) == 1
        assert runtime.watcher.num_tabs == 50
        # However many looks there were, each rendered one page.
        await until_rendered(runtime, 1)


async def test_each_distinct_page_is_rendered_once_per_refresh(site: Site) -> None:
    runtime = await runtime_of(site)
    topics = [topic(), topic(role=Role.ADMIN), topic(QUEUE, model="m")]
    async with AsyncExitStack() as stack:
        tabs = [await stack.enter_async_context(aclosing(runtime.watcher.follow(one))) for one in topics * 3]
        await asyncio.gather(*map(first_of, tabs))
        assert runtime.watcher.num_tabs == 9
        await until_rendered(runtime, 3)


async def test_the_watcher_polls_only_while_a_tab_is_open(site: Site) -> None:
    runtime = await runtime_of(site)
    async with aclosing(runtime.watcher.follow(topic())) as tab:
        await first_of(tab)
    looking = runtime.watcher._reading
    assert looking is not None
    async with asyncio.timeout(DEADLINE_S):
        await looking  # it ends by itself
    assert runtime.watcher.num_tabs == 0
    num_ticks = runtime.watcher.num_ticks
    async with aclosing(runtime.watcher.follow(topic())) as tab:
        await first_of(tab)
    assert runtime.watcher.num_ticks > num_ticks


async def test_a_tab_hears_of_a_change_and_of_nothing_else(site: Site) -> None:
    runtime = await runtime_of(site)
    async with aclosing(runtime.watcher.follow(topic(QUEUE, model="m"))) as tab:
        assert b'data-figure="waiting">0<' in await first_of(tab)
        for _ in range(3):
            await runtime.watcher.tick()
        await site.queue.pause(put_back=False)
        assert b"paused" in await first_of(tab)


async def test_an_unreadable_page_reports_its_error_and_other_pages_update(site: Site) -> None:
    runtime = await runtime_of(site)
    async with (
        aclosing(runtime.watcher.follow(topic(QUEUE, model="none"))) as wrong,
        aclosing(runtime.watcher.follow(topic())) as right,
    ):
        assert b"no worker has ever served model" in await first_of(wrong)
        assert b"Models" in await first_of(right)


async def test_the_stream_of_a_page_is_one_of_events(site: Site) -> None:
    app = await site.app(lambda _: None)
    assert (await (await site.visitor(app=app)).get("/live/overview")).status_code == 403
    app = await site.app(everybody(Access("x")))
    sent: asyncio.Queue[dict[str, object]] = asyncio.Queue()
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/live/overview",
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    gone = asyncio.Event()

    async def receive() -> dict[str, object]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        await sent.put(message)

    answering = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(DEADLINE_S):
        head, body = await sent.get(), await sent.get()
        headers = dict(head["headers"])  # type: ignore[call-overload]  # a list of pairs
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"no-transform" in headers[b"cache-control"]
        assert bytes(body["body"]).startswith(b"data: ")  # type: ignore[call-overload]  # bytes
        gone.set()
        await answering
    assert app.state.runtime.watcher.num_tabs == 0


async def test_loss_and_return_of_redis_are_reported(
    server: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.dashboard.app.RETRY_FOR_S", 0.1)
    async with AsyncExitStack() as stack:
        site = Site(server.url, namespace, stack)
        stack.push_async_callback(site.connection.close)
        await site.register()
        runtime = await runtime_of(site)
        async with aclosing(runtime.watcher.follow(topic())) as tab:
            assert b"Models" in await first_of(tab)
            server.kill()
            while b'role="alert"' not in await first_of(tab):
                pass
            server.start()
            await asyncio.to_thread(server.wait_until_ready)
            while b'role="alert"' in await first_of(tab):
                pass


async def test_a_tab_stream_ends_after_its_time_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ops.dashboard.runtime.MAX_STREAM_S", 0.0)
    runtime = await runtime_of(site)
    async with asyncio.timeout(DEADLINE_S):
        assert [event async for event in runtime.watcher.follow(topic())] == []
    assert runtime.watcher.num_tabs == 0
