"""A request may be at work, or over, before its client's subscription has begun."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.producer import Client, FinishReason
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection, Subscriber, Subscription
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta

from ....redis_server import RedisServer
from ..harness import DEADLINE_S, claim_one, until, until_followed, write


@pytest.mark.parametrize("is_over", [True, False])
async def test_records_published_before_the_subscription_are_delivered(
    client: Client, broker: Broker, commands: CommandConnection, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    may_subscribe = asyncio.Event()
    beginning = set[asyncio.Task[None]]()

    async def begin_late(self, channel, *callbacks):
        subscription = Subscription(channel.encode(), *callbacks)

        async def follow() -> None:
            await may_subscribe.wait()
            self.follow(subscription)

        beginning.add(asyncio.create_task(follow()))
        return subscription

    monkeypatch.setattr(Subscriber, "begin", begin_late)
    streaming = asyncio.ensure_future(client.generate("hi"))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    if is_over:
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    may_subscribe.set()
    if not is_over:

        async def is_heard() -> bool:
            return (await commands.execute("PUBSUB", "NUMSUB", broker.keys.output(claim.request_id)))[1] == 1

        await until(is_heard)
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        output = await streaming
    assert output.text == "AB"
    assert output.outputs[0].token_ids == [65, 66]


async def test_a_record_with_a_lost_message_is_read_by_the_next_check(
    client: Client, broker: Broker, commands: CommandConnection
) -> None:
    """Redis drops the connection of a subscriber that is slow, and messages meanwhile."""
    streaming = asyncio.ensure_future(client.generate("hi"))
    claim = await claim_one(broker)
    await until_followed(commands, broker, claim)
    await write(broker, claim, 0, 65)
    end = Delta(index=1, token_ids=[66], text="B", finish_reason=FinishReason.STOP)
    await commands.execute("RPUSH", broker.keys.log(claim.request_id), msgspec.msgpack.encode(end))
    async with asyncio.timeout(DEADLINE_S):
        assert (await streaming).text == "AB"


async def num_calls(commands: CommandConnection, name: str) -> int:
    stats = (await commands.execute("INFO", "commandstats")).decode()
    _, found, rest = stats.partition(f"cmdstat_{name}:calls=")
    return int(rest.split(",")[0]) if found else 0


async def test_many_waiting_requests_are_checked_in_one_command(server: RedisServer, engine: Broker) -> None:
    """The readers do not read their logs separately; records arrive by subscription."""
    async with Client.connect(server.url, model="m") as client:
        streaming = [asyncio.ensure_future(client.generate("hi")) for _ in range(20)]
        commands = CommandConnection(server.url)
        claims = [await claim_one(engine) for _ in streaming]
        await until_followed(commands, engine, *claims)

        async def were_looked_for() -> bool:
            return await num_calls(commands, "exists") > 0

        await until(were_looked_for)
        for claim in claims:
            await write(engine, claim, 0, 65, end=FinishReason.STOP)
        assert {output.text for output in await asyncio.gather(*streaming)} == {"A"}
        assert await num_calls(commands, "lrange") < len(claims)
        await commands.close()


async def test_channels_are_subscribed_in_batches(server: RedisServer) -> None:
    subscriber, commands = Subscriber(server.url), CommandConnection(server.url)
    await subscriber.open()
    heard: list[bytes] = []
    news = [Keys().model("m").output(f"r{number}") for number in range(50)]
    following = await asyncio.gather(*(subscriber.subscribe(channel, heard.append) for channel in news))
    assert await num_calls(commands, "subscribe") == 1
    for subscription in following:
        subscriber.unsubscribe(subscription)
    # Of what was said of a channel before it could be told, the last holds.
    again = await subscriber.subscribe(news[0], heard.append)
    for channel in news:
        await commands.execute("PUBLISH", channel, "x")
    await subscriber.subscribe("barrier", heard.append)
    assert heard == [b"x"]
    subscriber.unsubscribe(again)
    await subscriber.subscribe("barrier 2", heard.append)
    assert (await commands.execute("PUBSUB", "NUMSUB", *news))[1::2] == [0] * len(news)
    assert await num_calls(commands, "unsubscribe") == 2
    await subscriber.close()
    await commands.close()
