"""Which processes are there, which are missing, and workers that are told to leave."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack

import msgspec
import pytest

from penstock.ops.dashboard import Access, Role
from penstock.producer.background.agenda import Agenda
from penstock.producer.webhooks.event_store import DELIVER
from penstock.shared.connection import Subscriber
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.presence import Presence, ProcessKind, read_processes
from penstock.shared.messages.supervision import DrainCommand, EngineState, StopCommand, WorkerCommand

from ...redis_server import RedisServer
from .conftest import Site


async def test_a_dashboard_is_listed_as_a_process_until_it_ends(site: Site) -> None:
    app = await site.app(lambda _: Access("ann"))
    presence = app.state.runtime.presence
    await presence.say()
    visitor = await site.visitor(app=app)
    (told,) = (await visitor.get("/system.json")).json()["facts"]["processes"]
    assert (told["kind"], told["process"]) == ("dashboard", presence.record.process_id)
    assert told["options"] == {"operator_keys": "off"}
    assert told["process"] in (await visitor.get("/system")).text
    await app.state.runtime.close()
    assert await read_processes(site.connection.execute, site.keys) == []


async def test_the_system_page_lists_each_process_with_its_record(site: Site) -> None:
    presence = Presence(site.connection, site.keys, ProcessKind.GATEWAY, {"port": "<b>80</b>"})
    await presence.say()
    visitor = await site.visitor()
    told = (await visitor.get("/system.json")).json()["facts"]["processes"]
    assert [one["pid"] for one in told if one["kind"] == "gateway"] == [presence.record.pid]
    html = (await visitor.get("/system")).text
    assert "port &lt;b&gt;80&lt;/b&gt;" in html
    assert presence.record.package_version in html


async def test_due_webhooks_without_a_jobs_process_are_the_first_problem(site: Site) -> None:
    await site.register(state=EngineState.FAILED, error="no memory")
    for number in range(3):
        await Agenda(site.connection, site.keys).add(DELIVER, f"event-{number}")
        await site.connection.execute("ZADD", site.keys.jobs_due(), "XX", 1000, f"{DELIVER}:event-{number}")
    sentence = "no jobs process runs, and 3 webhooks are due"
    visitor = await site.visitor()
    problems = (await visitor.get("/overview.json")).json()["facts"]["problems"]
    assert problems[0] == sentence
    assert len(problems) > 1
    assert f"{sentence}; start &#39;penstock jobs&#39;" in (await visitor.get("/system")).text
    await Presence(site.connection, site.keys, ProcessKind.JOBS).say()
    assert sentence not in (await visitor.get("/overview.json")).json()["facts"]["problems"]
    assert sentence not in (await visitor.get("/system")).text


@pytest.mark.parametrize(
    ("path", "command", "confirm", "action", "note"),
    [
        ("/workers/drain", DrainCommand(timeout_s=30.0), {}, "worker.drain", "is draining: it claims no more"),
        ("/workers/stop", StopCommand(), {"confirm": "host-1"}, "worker.stop", "host-1 is stopping"),
    ],
)
async def test_draining_a_worker_is_recorded_with_its_actor(
    path: str, command: WorkerCommand, confirm: dict[str, str], action: str, note: str, site: Site
) -> None:
    heard: asyncio.Queue[WorkerCommand] = asyncio.Queue()
    decode = msgspec.msgpack.Decoder(WorkerCommand).decode
    supervisor = Subscriber(site.url)
    await supervisor.open()
    await supervisor.subscribe(site.keys.worker_commands("host-1"), lambda data: heard.put_nowait(decode(data)))
    operator = await site.visitor(Access("olga", Role.OPERATOR))
    # The worker is there as long as this test: the answer does not wait until it has left.
    assert (await operator.post(path, data={"worker": "host-1"} | confirm)).headers["location"] == "/engines"
    assert await heard.get() == command
    await site.register(state=EngineState.DRAINING, num_running_reqs=2, drains_until=time.time() + 3600)
    page = (await operator.get("/engines")).text
    assert note in page
    assert re.search(r"Worker host-1 is draining: 2 requests are still running, for at most 3[56]\d\d s\.", page)
    assert 'href="/requests?model=m&amp;state=running&amp;engine=host-1-0">2</a>' in page
    (entry,) = await Audit(site.connection, site.keys).read()
    assert (entry.actor, entry.action, entry.target, entry.result) == ("olga", action, "host-1", "ok")
    await supervisor.close()


async def test_a_stop_wants_its_word_and_a_viewer_may_not(site: Site) -> None:
    operator = await site.visitor(Access("olga", Role.OPERATOR))
    assert (await operator.post("/workers/stop", data={"worker": "host-1", "confirm": "host"})).status_code == 400
    unknown = await operator.post("/workers/drain", data={"worker": "host-2"})
    assert unknown.status_code == 400
    assert "worker_id must be one of host-1" in unknown.text
    viewer = await site.visitor(Access("vera", Role.VIEWER))
    assert "Drain" in (await operator.get("/engines")).text
    assert "Drain" not in (await viewer.get("/engines")).text
    for path in ("/workers/drain", "/workers/stop"):
        refused = await viewer.post(path, data={"worker": "host-1", "confirm": "host-1"})
        assert refused.status_code == 403


async def test_slow_calls_are_listed_by_script_and_key_without_contents(server: RedisServer, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        site = Site(server.url, namespace, stack)
        stack.push_async_callback(site.connection.close)
        await site.register()
        await site.enqueue("first")  # which sends the script
        await site.connection.execute("CONFIG", "SET", "slowlog-log-slower-than", 0)
        await site.enqueue("r", prompt="the password")
        await site.connection.execute("CONFIG", "SET", "slowlog-log-slower-than", -1)
        visitor = await site.visitor()
        slow = (await visitor.get("/system.json")).json()["facts"]["slow"]
        assert any(one["script"].startswith("enqueue") and one["key"].startswith(f"{namespace}:") for one in slow)
        html = (await visitor.get("/system")).text
        assert "Slow calls" in html
        assert "EVALSHA" in html
        assert "the password" not in html


async def test_a_server_without_slow_log_access_is_explained(server: RedisServer, namespace: str) -> None:
    async with AsyncExitStack() as stack:
        site = Site(server.url, namespace, stack)
        stack.push_async_callback(site.connection.close)
        await site.register()
        rights = ("on", "nopass", "~*", "&*", "+@all", "-slowlog")
        await site.connection.execute("ACL", "SETUSER", "default", *rights)
        visitor = await site.visitor()
        html = (await visitor.get("/system")).text
        assert "does not list slow calls" in html
        assert "No slow calls are recorded" not in html
