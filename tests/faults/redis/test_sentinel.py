"""The primary is killed under running streams; the Sentinels name another, and nothing is lost, repeated or changed."""

from __future__ import annotations

import asyncio

import pytest

from penstock.ops.lab.clusters.sentinel_trio import SentinelTrio
from penstock.producer import Client
from penstock.shared.connection import CommandConnection, Subscriber, checked_connection
from penstock.shared.errors import RedisUnavailableError
from penstock.shared.redis_access.check import check_redis

from ...gate import Gate
from ...processes import DEADLINE_S
from ..conftest import Start
from ..watching import PARAMS, PROMPT, Watched, all_under_way, beating, finish, undisturbed

NUM_HELD_TOKENS = 20


async def test_streams_wait_a_failover_out(trio: SentinelTrio, start: Start, gate: Gate) -> None:
    stack = await start(2, "--deterministic", redis_url=trio.url)
    async with Client.connect(trio.url) as client:
        whole = await undisturbed(client)
        gate.hold_at(NUM_HELD_TOKENS)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS * 2]
        await all_under_way(watched, NUM_HELD_TOKENS)
        old_port = await asyncio.to_thread(trio.kill_primary)
        # The engines generate on while there is no primary, and a request that comes now waits for it.
        gate.open()
        late = asyncio.create_task(client.generate(PROMPT, PARAMS[0]))
        await asyncio.to_thread(trio.await_failover, old_port)
        await finish(watched, whole * 2, gate)
        assert (await late).outputs[0].token_ids == whole[0].token_ids
        assert [beat.num_restarts for beat in await beating(stack.url, 2)] == [0, 0]

        # The old primary comes back as a replica, and is the primary again after the next failover.
        await asyncio.to_thread(trio.revive, old_port)
        await asyncio.to_thread(trio.wait_until_complete)
        gate.hold_at(NUM_HELD_TOKENS)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        await all_under_way(watched, NUM_HELD_TOKENS)
        await asyncio.to_thread(trio.kill_primary)
        await finish(watched, whole, gate)


async def test_all_that_takes_a_url_takes_one_of_sentinels(trio: SentinelTrio) -> None:
    await check_redis(trio.url, for_worker=True, for_jobs=True)
    async with checked_connection(trio.url) as connection:
        assert await connection.execute("PING")
    with pytest.raises(RedisUnavailableError, match="knows a live primary of that name") as caught:
        await check_redis(trio.url.replace("/penstock", "/other"))
    assert "s3cret" not in str(caught.value)


async def test_subscriptions_and_commands_meet_at_the_new_primary(trio: SentinelTrio) -> None:
    subscriber = Subscriber(trio.url)
    commands = CommandConnection(trio.url, on_moved=subscriber.reconnect)
    messages: list[bytes] = []
    restored = asyncio.Event()
    try:
        await subscriber.open()
        await subscriber.subscribe("channel", messages.append, restored.set)
        await commands.execute("SET", "key", "before")
        await asyncio.to_thread(trio.kill_primary)
        async with asyncio.timeout(DEADLINE_S):
            await commands.execute("SET", "key", "after")
            await restored.wait()
            while not messages:
                await commands.execute("PUBLISH", "channel", "message")
                await asyncio.sleep(0.05)
        assert await commands.execute("GET", "key") == b"after"
    finally:
        await subscriber.close()
        await commands.close()
