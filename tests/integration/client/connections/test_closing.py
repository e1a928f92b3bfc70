"""Closing comes to its end at whatever moment, however redis-py takes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio.connection import UnixDomainSocketConnection

from penstock.producer import Client, FinishReason
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.redis_access import link as redis_link
from penstock.shared.redis_access import replies
from penstock.shared.redis_access.check import check_redis

from ....processes import DEADLINE_S
from ..harness import claim_one, write

# A write takes a few turns of the event loop; the cancellation is to meet each of them.
NUM_TURNS = 8
# redis-py 8 has this timeout by default, and then writes by asyncio.wait_for.
OPTIONS = ["", "?socket_timeout=5"]


async def pass_turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def check_closing(url: str) -> None:
    """Close connections of both kinds, each that many turns after it began to write."""
    for num_turns in range(NUM_TURNS):
        subscriber, commands = Subscriber(url), CommandConnection(url)
        await asyncio.gather(subscriber.open(), commands.open())
        subscription = await subscriber.subscribe("news", lambda _: None)
        asking = asyncio.create_task(commands.execute("PING"))
        await asyncio.sleep(0)
        subscriber.unsubscribe(subscription)
        await pass_turns(num_turns)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(subscriber.close(), commands.close())
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("options", OPTIONS)
async def test_connections_close_while_they_write(redis_url: str, options: str) -> None:
    await check_closing(redis_url + options)


@pytest.mark.parametrize("options", OPTIONS)
async def test_a_client_closes_right_after_its_last_request(redis_url: str, namespace: str, broker, options) -> None:
    for num_turns in range(NUM_TURNS):
        client = await Client(redis_url + options, namespace=namespace).open()
        generating = asyncio.create_task(client.generate("hi"))
        await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)
        assert (await generating).text == "A"
        await pass_turns(num_turns)
        async with asyncio.timeout(DEADLINE_S):
            await client.close()


async def test_connections_close_though_writing_swallows_cancellations(redis_url: str, monkeypatch) -> None:
    send = UnixDomainSocketConnection.send_packed_command

    async def send_deaf(self: UnixDomainSocketConnection, *args: Any, **options: Any) -> None:
        await send(self, *args, **options)
        try:
            await pass_turns(3)
        except asyncio.CancelledError:
            return

    monkeypatch.setattr(UnixDomainSocketConnection, "send_packed_command", send_deaf)
    await check_closing(redis_url)


async def test_a_subscriber_closes_though_connecting_swallows_cancellations(
    redis_url: str, commands: CommandConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = UnixDomainSocketConnection.connect
    is_connecting = asyncio.Event()

    async def connect_deaf(self: UnixDomainSocketConnection) -> None:
        is_connecting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await connect(self)

    subscriber = Subscriber(redis_url)
    await subscriber.open()
    await subscriber.subscribe("news", lambda _: None)
    await commands.open()
    monkeypatch.setattr(UnixDomainSocketConnection, "connect", connect_deaf)
    await commands.execute("CLIENT", "KILL", "TYPE", "pubsub")
    async with asyncio.timeout(DEADLINE_S):
        await is_connecting.wait()
        await subscriber.close()


@pytest.mark.parametrize("parser", ["hiredis", "redis-py"])
async def test_a_connection_outlives_a_silence_longer_than_the_urls_timeout(redis_url, namespace, monkeypatch, parser):
    if parser == "redis-py":
        monkeypatch.setattr(replies, "hiredis", None)
        monkeypatch.setattr(redis_link, "hiredis_pack", None)
    connection = CommandConnection(f"{redis_url}?socket_timeout=0.05")
    try:
        async with asyncio.timeout(DEADLINE_S):
            before = await connection.execute("CLIENT", "ID")
            assert await connection.execute("BLPOP", f"{namespace}:nothing", "0.3") is None
            assert await connection.execute("CLIENT", "ID") == before
    finally:
        await connection.close()


@pytest.mark.parametrize("options", OPTIONS)
async def test_a_check_that_is_cancelled_ends_by_that(redis_url: str, options: str) -> None:
    """Cancel in each iteration; a check that ignored it would repeat for ever."""
    num_turns = 0
    while True:
        checking = asyncio.create_task(check_redis(redis_url + options))
        await pass_turns(num_turns)
        if not checking.cancel():
            break
        await asyncio.gather(checking, return_exceptions=True)
        assert checking.cancelled(), num_turns
        num_turns += 1
    await checking
