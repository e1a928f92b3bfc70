"""Who is there, what is missing, and who says so."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest
import structlog

from penstock.ops import cli as penstock_cli
from penstock.producer import Client
from penstock.producer.background.agenda import Agenda
from penstock.producer.control.deployment import Deployment, Finding, count_due, read_deployment
from penstock.producer.webhooks.event_store import DELIVER
from penstock.shared.broker import Broker, Homes, Queue
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.presence import (
    ENTERED_AGAIN_EVERY,
    Presence,
    ProcessKind,
    ProcessRecord,
    read_processes,
)
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import DrainCommand, EngineState, WorkerCommand
from penstock.shared.process.command_line import EXIT_FAILED
from penstock.shared.process.log import configure_logging
from penstock.shared.swap.views import SleepLevel

from ..conftest import LONG_MS


@pytest.fixture
def keys(namespace: str) -> Keys:
    return Keys(namespace)


async def make_due(commands: CommandConnection, keys: Keys, number: int) -> None:
    """Have webhooks due since long ago: half of them on the agenda, the others still in an outbox."""
    for i in range(number // 2):
        await Agenda(commands, keys).add(DELIVER, f"evt{i}")
        await commands.execute("ZADD", keys.jobs_due(), "XX", 1000, f"{DELIVER}:evt{i}")
    await commands.execute("SADD", keys.webhook_models(), "m")
    for i in range(number - number // 2):
        await commands.execute("XADD", keys.model("m").outbox, f"{i + 1}-0", "event", "e")


async def test_a_process_is_listed_until_it_leaves(commands: CommandConnection, keys: Keys) -> None:
    presence = Presence(commands, keys, ProcessKind.GATEWAY, {"port": "1"})
    await presence.say()
    presence.start()
    (found,) = await read_processes(commands.execute, keys)
    assert (found.kind, found.options, found.pid) == ("gateway", {"port": "1"}, presence.record.pid)
    assert found.package_version
    assert 0 < await commands.execute("PTTL", keys.process(found.process_id)) <= 16_000
    for _ in range(2):
        await presence.leave()
    assert await read_processes(commands.execute, keys) == []


async def test_a_process_enters_itself_again_where_its_word_is_lost_and_every_now_and_then(
    commands: CommandConnection, keys: Keys
) -> None:
    presence = Presence(commands, keys, ProcessKind.GATEWAY)

    async def is_listed() -> bool:
        return bool(await commands.execute("SISMEMBER", keys.processes(), presence.record.process_id))

    for _ in range(2):
        await presence.say()
        await commands.execute("SREM", keys.processes(), presence.record.process_id)
    await presence.say()
    assert not await is_listed()  # its word is there: one call less
    await commands.execute("DEL", keys.process(presence.record.process_id))
    await presence.say()
    assert await is_listed()
    await commands.execute("SREM", keys.processes(), presence.record.process_id)
    for _ in range(ENTERED_AGAIN_EVERY):
        await presence.say()
    assert await is_listed()


_IS_THERE = """
    import asyncio, sys
    from penstock.shared.connection import CommandConnection
    from penstock.shared.keys import Keys
    from penstock.shared.deployment.presence import Presence, ProcessKind

    async def main():
        await Presence(CommandConnection(sys.argv[1]), Keys(sys.argv[2]), ProcessKind.JOBS).say()
        print(flush=True)
        sys.stdin.read()

    asyncio.run(main())
"""


async def test_a_killed_process_is_forgotten_by_its_time_to_live(
    redis_url: str, commands: CommandConnection, keys: Keys
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_IS_THERE), redis_url, keys.namespace]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220  # short
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (found,) = await read_processes(commands.execute, keys)
    assert found.pid == process.pid
    # As if its time had come.
    await commands.execute("PEXPIRE", keys.process(found.process_id), 0)
    assert await read_processes(commands.execute, keys) == []


async def test_the_last_error_of_a_process_is_reported(commands: CommandConnection, keys: Keys) -> None:
    configure_logging("info")
    try:
        structlog.get_logger().error("reaping_failed", error="no way")
    finally:
        structlog.reset_defaults()
    presence = Presence(commands, keys, ProcessKind.SUPERVISOR)
    await presence.say()
    (found,) = await read_processes(commands.execute, keys)
    assert found.last_error == "reaping failed: no way"
    assert found.last_error_at > 0


async def test_due_webhooks_without_a_jobs_process_are_an_error(commands: CommandConnection, keys: Keys) -> None:
    await make_due(commands, keys, 12)
    found = await read_deployment(commands, keys)
    assert [(one.code, one.message) for one in beside_redis(found)] == [
        ("no_jobs", "no jobs process runs, and 12 webhooks are due")
    ]
    await Presence(commands, keys, ProcessKind.JOBS).say()
    assert beside_redis(await read_deployment(commands, keys)) == []


def beside_redis(found: Deployment) -> list[Finding]:
    """Return the findings, without those of the Redis of the tests, which has no append-only file."""
    return [one for one in found.findings if one.code != "redis_not_persistent"]


async def test_a_redis_that_keeps_nothing_is_a_note(commands: CommandConnection, keys: Keys) -> None:
    (found,) = (await read_deployment(commands, keys)).findings
    assert (found.code, found.is_error) == ("redis_not_persistent", False)
    assert "a crash of it loses" in found.message


async def test_jobs_that_just_became_due_are_not_reported(commands: CommandConnection, keys: Keys) -> None:
    await Agenda(commands, keys).add(DELIVER, "evt")
    assert await count_due(commands, keys) == {}


async def test_a_queue_without_engines_and_a_paused_one_are_reported(commands: CommandConnection, keys: Keys) -> None:
    await commands.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m")))
    assert beside_redis(await read_deployment(commands, keys)) == []
    await Broker(commands, keys.model("m")).enqueue("a", b"p", result_ttl_ms=60_000)
    await Queue(commands, keys.model("m")).pause(put_back=False)
    found = await read_deployment(commands, keys)
    assert [one.code for one in beside_redis(found)] == ["no_engine", "paused"]
    await Homes(commands, keys.model("m")).renew("gpu0", SleepLevel.DISK, 1.0, lease_ttl_ms=LONG_MS)
    assert [one.code for one in beside_redis(await read_deployment(commands, keys))] == ["paused"]
    assert found.findings[0].message.startswith("no engine serves model m, and 1 request waits for it")


async def test_the_status_command_prints_the_error_and_fails(
    redis_url: str, commands: CommandConnection, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_due(commands, keys, 12)
    await Presence(commands, keys, ProcessKind.DASHBOARD).say()
    arguments = ["status", "--redis-url", redis_url, "--namespace", keys.namespace]
    status, told = await run(arguments, capsys)
    assert (status, "ERROR: no jobs process runs, and 12 webhooks are due; start 'penstock jobs'" in told) == (
        EXIT_FAILED,
        True,
    )
    assert "dashboard" in told
    status, told = await run([*arguments, "--json"], capsys)
    assert json.loads(told)["num_due"] == {"webhooks": 12}


async def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command as its process would: in a loop of its own."""
    status = await asyncio.to_thread(penstock_cli.main, arguments)
    return status, capsys.readouterr().out


async def test_a_client_makes_a_worker_leave(redis_url: str, commands: CommandConnection, keys: Keys) -> None:
    """The test plays the supervisor: it receives the command and exits."""
    heard = asyncio.Queue[WorkerCommand]()
    beat = EngineHeartbeat(
        worker_id="host-1",
        engine_id="host-1-0",
        model="m",
        state=EngineState.READY,
        host="host",
        worker_pid=1,
        core_pid=2,
    )
    await commands.execute("SET", keys.engine("host-1-0"), msgspec.json.encode(beat))
    await commands.execute("SADD", keys.engines(), "host-1-0")
    supervisor = Subscriber(redis_url)
    await supervisor.open()
    decode = msgspec.msgpack.Decoder(WorkerCommand).decode
    async with Client.connect(redis_url, namespace=keys.namespace) as client:
        with pytest.raises(ValidationError, match="worker_id must be one of host-1, got 'host-2'"):
            await client.drain_worker("host-2")
        await supervisor.subscribe(keys.worker_commands("host-1"), lambda data: heard.put_nowait(decode(data)))
        leaving = asyncio.create_task(client.drain_worker("host-1", timeout_s=7))
        assert await heard.get() == DrainCommand(timeout_s=7)
        assert not leaving.done()
        await commands.execute("DEL", keys.engine("host-1-0"))
        await leaving
    await supervisor.close()


def test_a_record_of_version_1_still_decodes() -> None:
    data = b'{"process_id":"jobs-1","kind":"jobs","host":"h","pid":7,"package_version":"0.2","started_at":5.0,"new":1}'
    record = msgspec.json.decode(data, type=ProcessRecord)
    assert (record.kind, record.pid, record.last_error) == ("jobs", 7, "")
