"""Redis is full, forgets, or turns out to be a replica: what waits, and what ends with an error that says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from penstock.producer import Client, Delta, FinishReason, SamplingParams
from penstock.producer.requests import log_checks
from penstock.producer.requests.reader import DeltaReader
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import (
    OutputChangedError,
    RedisFullError,
    RedisUnavailableError,
    RequestLostError,
    RequestNotFoundError,
)

from ....processes import DEADLINE_S
from ....redis_server import RedisServer
from ..harness import claim_one, collect, token_indexes, until, write


async def test_a_full_server_is_waited_for(server: RedisServer, engine: Broker) -> None:
    commands = CommandConnection(server.url)
    async with Client.connect(server.url) as client:
        streaming = asyncio.ensure_future(collect(client, "r"))
        claim = await claim_one(engine)
        await write(engine, claim, 0, 65)
        await set_maxmemory(commands, 1)
        writing = asyncio.ensure_future(write(engine, claim, 1, 66, end=FinishReason.STOP))
        claiming = asyncio.ensure_future(engine.claim("e0", EngineCapacity(max_num_seqs=1)))
        with pytest.raises(RedisFullError, match=r"is full .*raise its maxmemory") as caught:
            await client.generate("hi", request_id="refused")
        assert caught.value.retryable
        assert caught.value.retry_after_s > 0
        with pytest.raises(RedisFullError):
            await client.submit("hi", request_id="refused")
        assert await engine.state("refused") is None
        assert not writing.done()
        assert not claiming.done()
        assert not streaming.done()
        await set_maxmemory(commands, 0)
        async with asyncio.timeout(DEADLINE_S):
            await writing
            assert (await claiming).claims == []
            assert "".join(delta.text for delta in await streaming) == "AB"
        accepted = await client.submit("hi", request_id="refused")
        assert await engine.state(accepted.request_id) == "queued"
    await commands.close()


async def test_a_full_server_is_an_error_that_names_the_remedy(server: RedisServer) -> None:
    commands = CommandConnection(server.url, retry_for_s=0.3)
    await set_maxmemory(commands, 1)
    with pytest.raises(RedisUnavailableError, match=r"is full .*raise its maxmemory"):
        await commands.execute("SET", "key", "value")
    await set_maxmemory(commands, 0)
    await commands.execute("SET", "key", "value")
    await commands.close()


async def set_maxmemory(commands: CommandConnection, num_bytes: int) -> None:
    """0 for no bound; with 1 every command is refused that could need memory."""
    await commands.execute("CONFIG", "SET", "maxmemory", num_bytes)


async def test_detached_requests_that_redis_has_forgotten_end(client, broker, monkeypatch) -> None:
    """Only the submitter has their bytes."""
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    gone = await client.submit("hi", request_id="gone")
    await write(broker, await claim_one(broker), 0, 65)
    kept = await client.submit("hi", request_id="kept")
    streams = [handle.stream() for handle in (gone, kept)]
    assert (await anext(streams[0])).token_ids == [65]  # from here on it is known to have been there
    waits = [asyncio.ensure_future(collect_all(stream)) for stream in streams]
    await broker.forget("gone")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RequestLostError, match="is no longer in Redis"):
            await waits[0]
    assert not waits[1].done()
    await broker.cancel("kept")
    assert [delta.finish_reason for delta in await waits[1]] == ["cancelled"]


async def test_a_streamed_request_lost_by_redis_is_sent_again(client, broker, monkeypatch) -> None:
    """The request keeps its seed, so the output is the same; delivered tokens are not repeated."""
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    stream = client.stream("hi", SamplingParams(), request_id="r", timeout_s=1000)
    first = asyncio.ensure_future(anext(stream))
    await write(broker, await claim_one(broker), 0, 65)
    assert (await first).token_ids == [65]
    rest = asyncio.ensure_future(collect_all(stream))
    await broker.forget("r")
    claim = await claim_one(broker)
    assert 0 < claim.expires_in_ms <= 1_000_000
    await write(broker, claim, 0, 65)
    await write(broker, claim, 1, 66, end=FinishReason.STOP)
    assert token_indexes(await rest) == [1]


async def test_a_resent_request_waits_for_a_full_redis(server: RedisServer, engine: Broker, monkeypatch) -> None:
    """The request was accepted once, so the stream must not fail with the refusal."""
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    commands = CommandConnection(server.url)
    async with Client.connect(server.url) as client:
        stream = client.stream("hi", SamplingParams(), request_id="r")
        first = asyncio.ensure_future(anext(stream))
        await write(engine, await claim_one(engine), 0, 65)
        assert (await first).token_ids == [65]
        await set_maxmemory(commands, 1)
        await commands.execute("CONFIG", "RESETSTAT")
        await engine.forget("r")
        rest = asyncio.ensure_future(collect_all(stream))
        await until(lambda: has_refused(commands))
        assert not rest.done()
        await set_maxmemory(commands, 0)
        claim = await claim_one(engine)
        await write(engine, claim, 0, 65)
        await write(engine, claim, 1, 66, end=FinishReason.STOP)
        assert token_indexes(await rest) == [1]
    await commands.close()


async def has_refused(commands: CommandConnection) -> bool:
    """Whether the server has answered with an error since its figures were reset."""
    return b"total_error_replies:0\r" not in await commands.execute("INFO", "stats")


@pytest.mark.parametrize(
    ("told", "again"),
    [
        ("ABCD", ((1, "BCDEF"), (6, "G"))),  # a record begins in what was seen, and ends beyond it
        ("ABCD", ((1, "BC"), (4, "DEF"), (6, "G"))),  # the text lags where what was seen ends
        ("ABC", ((1, "BCD"), (4, "EF"), (6, "G"))),  # it lagged before
        ("ABCD", ((1, "B"), (3, ""), (4, "C"), (5, "DEFG"))),
    ],
)
async def test_text_is_delivered_once_when_a_shorter_log_is_read_before_it_grows(
    told: str,
    again: tuple[tuple[int, str], ...],
    broker: Broker,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The repeated text is split into other records."""
    subscriber, has_read, read_log = Subscriber(redis_url), asyncio.Event(), broker.read_log

    async def noted_read_log(request_id: str, start: int = 0) -> list[Delta]:
        records = await read_log(request_id, start)
        has_read.set()
        return records

    await subscriber.open()
    reader = DeltaReader(broker, subscriber, "r")
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    await reader.subscribe()
    first = asyncio.ensure_future(anext(reader))
    await write(broker, await claim_one(broker), 0, 65, 66, 67, 68, text=told)
    assert (await first).text == told
    await broker.forget("r")
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    monkeypatch.setattr(broker, "read_log", noted_read_log)
    rest = asyncio.ensure_future(collect_all(reader))
    reader.catch_up()
    await has_read.wait()
    for (index, text), (stop, _) in itertools.pairwise((*again, (7, ""))):
        end = FinishReason.STOP if stop == 7 else None
        await write(broker, claim, index, *range(65 + index, 65 + stop), end=end, text=text)
    assert told + "".join(delta.text for delta in await rest) == "ABCDEFG"
    reader.close()
    await subscriber.close()


async def test_a_changed_output_after_a_resend_is_an_error_that_names_the_token(client, broker, monkeypatch) -> None:
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    stream = client.stream("hi", SamplingParams(), request_id="r")
    first = asyncio.ensure_future(anext(stream))
    await write(broker, await claim_one(broker), 0, 65, 66)
    assert (await first).token_ids == [65, 66]
    rest = asyncio.ensure_future(collect_all(stream))
    await broker.forget("r")
    await write(broker, await claim_one(broker), 0, 65, 90, 91)
    with pytest.raises(OutputChangedError, match="token 1 came again as 90 where it had been 66"):
        await rest


async def collect_all(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


async def test_streams_end_at_a_primary_that_has_become_a_replica(server: RedisServer, engine, monkeypatch) -> None:
    monkeypatch.setattr(log_checks, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(log_checks, "READ_ONLY_PATIENCE_S", 0.5)
    commands = CommandConnection(server.url)
    async with Client.connect(server.url) as client:
        streaming = asyncio.ensure_future(collect(client, "r"))
        await write(engine, await claim_one(engine), 0, 65)
        handle = await client.submit("hi")
        waits = [streaming, asyncio.ensure_future(handle.result())]
        await commands.execute("REPLICAOF", "127.0.0.1", "1")
        async with asyncio.timeout(DEADLINE_S):
            for wait in waits:
                with pytest.raises(RedisUnavailableError, match=r"read-only replica .*the primary"):
                    await wait
        await commands.execute("REPLICAOF", "NO", "ONE")
        await client.cancel(handle.request_id, model=handle.model)
        with pytest.raises(RequestNotFoundError):
            await (await client.handle("never", model="m")).result()
    await commands.close()


async def test_the_subscriber_follows_a_failover_that_it_does_not_notice(server: RedisServer, engine: Broker) -> None:
    """The old primary refuses writes and publishes nothing more; its connections stay."""
    async with Client.connect(server.url) as client:
        commands = CommandConnection(server.url)
        streaming = asyncio.ensure_future(collect(client, "r"))
        claim = await claim_one(engine)
        subscriber_ids = await subscribed_connections(commands)
        await commands.execute("REPLICAOF", "127.0.0.1", "1")
        submitting = asyncio.ensure_future(client.submit("hi"))
        await until(lambda: was_refused(client))
        await commands.execute("REPLICAOF", "NO", "ONE")
        await submitting

        async def is_another() -> bool:
            found = await subscribed_connections(commands)
            return bool(found) and not found & subscriber_ids

        await until(is_another)
        await write(engine, claim, 0, 65, end=FinishReason.STOP)
        assert [delta.text for delta in await streaming] == ["A"]
        await commands.close()


async def subscribed_connections(commands: CommandConnection) -> set[str]:
    listed = (await commands.execute("CLIENT", "LIST", "TYPE", "pubsub")).decode()
    return {line.split()[0] for line in listed.splitlines()}


async def was_refused(client: Client) -> bool:
    return client._commands.read_only_for_s > 0
