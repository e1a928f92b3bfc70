"""Redis is stopped, killed, restarted, fails over or forgets; streams go on without gap or repeat."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from penstock.producer import Client, Delta, FinishReason
from penstock.shared import connection as connection_module
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import RedisUnavailableError
from penstock.shared.redis_access import link as redis_link

from ....redis_server import RedisServer
from ..harness import DEADLINE_S, claim_one, collect, token_indexes, until, write

NUM_STREAMS = 60
NUM_STEPS = 120


async def claim_all(engine: Broker, number: int) -> list[Claim]:
    claims: list[Claim] = []

    async def has_all() -> bool:
        claims.extend(
            (await engine.claim("e0", EngineCapacity(max_num_seqs=number + len(claims), num_seqs=len(claims)))).claims
        )
        return len(claims) == number

    await until(has_all)
    return claims


async def step(engine: Broker, claims: list[Claim], index: int) -> None:
    """Produce one token for each request; the last one is the end."""
    delta = Delta(index=index, token_ids=[65 + index % 26], text=chr(65 + index % 26))
    if index < NUM_STEPS - 1:
        assert await engine.append([Record(claim.request_id, claim.epoch, delta) for claim in claims]) == []
    else:
        delta.finish_reason = FinishReason.LENGTH
        assert await engine.finish([FinalRecord(claim.request_id, claim.epoch, delta) for claim in claims]) == []


def assert_whole(deltas: list[Delta]) -> None:
    assert token_indexes(deltas) == list(range(NUM_STEPS))
    assert "".join(delta.text for delta in deltas) == "".join(chr(65 + i % 26) for i in range(NUM_STEPS))
    assert [delta.finish_reason for delta in deltas if delta.finished] == [FinishReason.LENGTH]


async def test_streams_resume_after_redis_was_killed_and_restarted(server: RedisServer, engine: Broker) -> None:
    # One after the other: two that kill one server would start two.
    killing = asyncio.Lock()

    async def kill_and_restart() -> None:
        async with killing:
            await asyncio.to_thread(server.kill)
            server.start()

    async with Client.connect(server.url) as client:
        streams = [asyncio.ensure_future(collect(client, f"r{i}")) for i in range(NUM_STREAMS)]
        claims = await claim_all(engine, NUM_STREAMS)
        restarts = []
        for index in range(NUM_STEPS):
            await step(engine, claims, index)
            if index % 40 == 20 or index == NUM_STEPS - 3:
                # While the engine goes on writing.
                restarts.append(asyncio.create_task(kill_and_restart()))
                await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*restarts)
            for deltas in await asyncio.gather(*streams):
                assert_whole(deltas)
        assert await client.models()  # commands work, too


async def test_streams_resume_after_redis_was_suspended(server: RedisServer, engine: Broker, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "LOOK_INTERVAL_S", 0.1)
    monkeypatch.setattr(redis_link, "CONNECT_TIMEOUT_S", 0.3)
    with capture_logs() as logs:
        async with Client.connect(server.url) as client:
            # What the client asks now and then has an outage of its own, in the middle of the engine's.
            of_client: Any = client._commands
            of_client._outage._log = of_client._outage._log.bind(used_for="what the client asks")
            streams = [asyncio.ensure_future(collect(client, f"r{i}")) for i in range(NUM_STREAMS)]
            claims = await claim_all(engine, NUM_STREAMS)
            for index in range(NUM_STEPS):
                await step(engine, claims, index)
                if index % 50 == 20:
                    server.send(signal.SIGSTOP)
                    asyncio.get_running_loop().call_later(2, server.send, signal.SIGCONT)
            async with asyncio.timeout(DEADLINE_S):
                for deltas in await asyncio.gather(*streams):
                    assert_whole(deltas)
    told = [record for record in logs if record["used_for"] == "commands"]
    assert (told[0]["event"], told[0]["log_level"]) == ("redis_away", "warning")
    assert "no reply for" in told[0]["reason"]
    assert (told[1]["event"], told[1]["log_level"]) == ("redis_back", "info")
    # A line per change, and none per command and attempt.
    assert [record["event"] for record in told] == ["redis_away", "redis_back"] * (len(told) // 2)


async def test_an_end_published_without_subscribers_is_delivered(client, broker, commands) -> None:
    streams = [asyncio.ensure_future(collect(client, f"r{i}")) for i in range(200)]
    claims = await claim_all(broker, 200)
    end = Delta(token_ids=[65], text="A", finish_reason=FinishReason.STOP)
    ends = [FinalRecord(claim.request_id, claim.epoch, end) for claim in claims]
    # One write: Redis runs the second command before it can hear of the subscriber's return.
    await asyncio.gather(commands.execute("CLIENT", "KILL", "TYPE", "pubsub"), broker.finish(ends))
    async with asyncio.timeout(DEADLINE_S):
        for deltas in await asyncio.gather(*streams):
            assert [(delta.text, delta.finish_reason) for delta in deltas] == [("A", FinishReason.STOP)]


async def test_scripts_and_requests_survive_a_restart(server: RedisServer, engine: Broker) -> None:
    async with Client.connect(server.url) as client:
        handle = await client.submit("hi", request_id="r")
        server.kill()
        server.start()
        assert await engine.state("r") == "queued"
        await write(engine, await claim_one(engine), 0, 65, end=FinishReason.STOP)
        assert (await handle.result()).text == "A"
        assert (await client.generate("hi", request_id="r")).text == "A"


async def test_a_server_that_loads_its_data_is_waited_for(server: RedisServer, engine: Broker) -> None:
    async with Client.connect(server.url) as client:
        streaming = asyncio.ensure_future(collect(client, "r"))
        claim = await claim_one(engine)
        server.kill()
        server.start_loading()
        writing = asyncio.ensure_future(write(engine, claim, 0, 65, end=FinishReason.STOP))

        async def were_refused() -> bool:
            try:
                async with redis.asyncio.Redis.from_url(server.url) as asking:
                    refusals = await asking.info("errorstats")
            except redis.ConnectionError:
                return False
            return "errorstat_LOADING" in refusals and refusals["errorstat_LOADING"]["count"] >= 5

        await until(were_refused, timeout_s=60)
        assert not writing.done()
        assert not streaming.done()
        server.finish_loading()
        async with asyncio.timeout(DEADLINE_S):
            await writing
            assert [delta.text for delta in await streaming] == ["A"]


async def test_a_server_that_is_read_only_for_a_while_is_waited_for(server: RedisServer, engine: Broker) -> None:
    commands = CommandConnection(server.url)
    async with Client.connect(server.url) as client:
        streaming = asyncio.ensure_future(collect(client, "r"))
        claim = await claim_one(engine)
        num_before = await num_script_calls(commands)
        await commands.execute("REPLICAOF", "127.0.0.1", "1")
        writing = asyncio.ensure_future(write(engine, claim, 0, 65, end=FinishReason.STOP))
        claiming = asyncio.ensure_future(
            engine.claim("e0", EngineCapacity(max_num_seqs=1))
        )  # not to be sent again, but this was not run

        async def were_refused() -> bool:
            return await num_script_calls(commands) > num_before + 5

        await until(were_refused)
        assert not writing.done()
        await commands.execute("REPLICAOF", "NO", "ONE")
        await writing
        assert (await claiming).claims == []
        assert [delta.text for delta in await streaming] == ["A"]
    await commands.close()


async def num_script_calls(commands: CommandConnection) -> int:
    stats = (await commands.execute("INFO", "commandstats")).decode()
    return int(stats.split("cmdstat_evalsha:calls=")[1].split(",")[0])


async def test_unanswered_commands_are_retried_until_their_time_limit(server: RedisServer, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "LOOK_INTERVAL_S", 0.05)
    monkeypatch.setattr(redis_link, "CONNECT_TIMEOUT_S", 0.2)
    patient, hasty = CommandConnection(server.url), CommandConnection(server.url, retry_for_s=0.3)
    for connection in (patient, hasty):
        await connection.open()
    server.send(signal.SIGSTOP)
    waiting = [asyncio.ensure_future(patient.execute("INCRBY", "sum", 0)) for _ in range(500)]
    async with asyncio.timeout(connection_module.RETRY_FOR_S / 2):
        with pytest.raises(RedisUnavailableError, match="does not answer"):
            await hasty.execute("PING")
        with pytest.raises(RedisUnavailableError, match="does not answer"):
            await patient.execute("PING", retry=False)
    assert not any(reply.done() for reply in waiting)
    server.send(signal.SIGCONT)
    async with asyncio.timeout(connection_module.RETRY_FOR_S / 2):
        assert set(await asyncio.gather(*waiting)) == {0}
    for connection in (patient, hasty):
        await connection.close()


async def test_close_does_not_wait_for_a_stopped_server(server: RedisServer, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "LOOK_INTERVAL_S", 0.05)
    connection = CommandConnection(server.url)
    await connection.open()
    server.send(signal.SIGSTOP)
    waiting = asyncio.ensure_future(connection.execute("PING"))
    await until(lambda: is_reconnecting(connection))
    async with asyncio.timeout(connection_module.RETRY_FOR_S / 2):  # far less than it would wait
        await connection.close()
        with pytest.raises(RedisUnavailableError):
            await waiting


async def is_reconnecting(connection: Any) -> bool:
    return connection._connection is None and connection._opening is not None


async def test_a_wrong_command_fails_immediately(commands: CommandConnection) -> None:
    with pytest.raises(ResponseError, match="unknown command"):
        await commands.execute("NOSUCHCOMMAND")


@pytest.mark.parametrize(
    ("refusal", "is_for_now"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("Error running script (call to f_1): @user_script:12: @user_script: 12: -READONLY You can't write", True),
        ("BUSY Redis is busy running a script.", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("MISCONF Redis is configured to save RDB snapshots", True),
        ("OOM command not allowed when used memory > 'maxmemory'. script: 1f, on @user_script:12.", True),
        (
            "ERR Error running script (call to f_1): @user_script:7: @user_script: 7: -OOM command not",
            True,
        ),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("unknown command 'READONLYX'", False),
        ("unknown command 'OOM'", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_which_redis_errors_count_as_temporary(refusal: str, is_for_now: bool) -> None:
    assert redis_link.refuses_for_now(ResponseError(refusal)) == is_for_now


@pytest.mark.parametrize("num_lost", [1, 2, 4])
async def test_a_log_that_lost_its_end_is_written_again_without_gap_or_repeat(client, broker, commands, num_lost):
    """Redis crashed between sending records and keeping them; the request is resumed at an earlier token."""
    stream = client.stream("hi", request_id="r")
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    got = []
    for index in range(5):
        await write(broker, claim, index, 65 + index)
        got.append(await (first if index == 0 else anext(stream)))
    for _ in range(num_lost):
        await commands.execute("RPOP", broker.keys.log("r"))
    await commands.execute("HSET", broker.keys.request("r"), "count", 5 - num_lost)
    await commands.execute("CLIENT", "KILL", "TYPE", "pubsub")
    # The same tokens, cut otherwise.
    await write(broker, claim, 5 - num_lost, *range(70 - num_lost, 72))
    async with asyncio.timeout(DEADLINE_S):
        got.append(await anext(stream))
        await write(broker, claim, 7, 72, 73)
        await write(broker, claim, 9, 74, end=FinishReason.STOP)
        got += [delta async for delta in stream]
    assert token_indexes(got) == list(range(10))
    assert "".join(delta.text for delta in got) == "ABCDEFGHIJ"
    assert sum(delta.finished for delta in got) == 1


async def test_an_end_below_the_delivered_position_ends_the_stream(client, broker, commands) -> None:
    stream = client.stream("hi", request_id="r")
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    await first
    await write(broker, claim, 1, 66)
    await anext(stream)
    await commands.execute("RPOP", broker.keys.log("r"))
    await commands.execute("HSET", broker.keys.request("r"), "count", 1)
    await broker.cancel("r")
    async with asyncio.timeout(DEADLINE_S):
        assert [(d.index, d.token_ids, d.finish_reason) async for d in stream] == [(2, [], "cancelled")]
