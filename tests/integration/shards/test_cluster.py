"""A cluster as a shard: each model at its node, whatever node that is by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from redis.crc import key_slot
from structlog.testing import capture_logs

from penstock.ops.lab.clusters.cluster_trio import ClusterTrio
from penstock.producer import Client, SamplingParams
from penstock.shared.broker import NEW, Broker, EngineCapacity
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.records import DeathCause
from penstock.shared.errors import ConfigurationError, RedisUnsupportedError
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.redis_access.check import check_redis
from penstock.shared.shards import ShardMover, check_servers, make_pair, make_servers

from ...processes import DEADLINE_S
from ..client.harness import claim_one, until, until_followed, write

CAUSE = DeathCause(engine_id="e0", reason="it fell over")


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ClusterTrio]:
    """Start a cluster for one test alone."""
    with ClusterTrio(tmp_path / "cluster", password="s3cret", is_kept=True) as trio:
        yield trio


@pytest.fixture
async def pair(own_cluster: ClusterTrio) -> AsyncIterator[tuple[CommandConnection, Subscriber]]:
    commands, subscriber = make_pair(own_cluster.url)
    await subscriber.open()
    yield commands, subscriber
    await subscriber.close()
    await commands.close()


def models_by_node(trio: ClusterTrio, namespace: str) -> dict[int, str]:
    """A model that each node serves, by the node's port."""
    found: dict[int, str] = {}
    for number in range(1000):
        port = trio.port_of(Keys(namespace).model(f"m{number}").leases)
        found.setdefault(port, f"m{number}")
        if len(found) == len(trio.ports):
            return found
    raise AssertionError


async def test_streams_of_models_at_each_node(redis_url: str, namespace: str, cluster: ClusterTrio) -> None:
    shards = {"c": cluster.url}
    models = [*(await asyncio.to_thread(models_by_node, cluster, namespace)).values()]
    async with Client.connect(redis_url, namespace=namespace, shards=shards) as client:
        home = CommandConnection(redis_url)
        for model in models:
            broker = await serve_at(home, client, namespace, model)
            answering = asyncio.create_task(answer(broker))
            assert (await client.generate("hi", SamplingParams(), model=model)).outputs[0].token_ids == [5, 6]
            await answering
        await home.close()
    servers = [await asyncio.to_thread(cluster.do, port, "KEYS", f"{namespace}:*") for port in cluster.ports]
    assert all(cast(list[bytes], names) for names in servers)


async def serve_at(home: CommandConnection, client: Client, namespace: str, model: str) -> Broker:
    await serve_card(home, namespace, model)
    return Broker(client._commands, Keys(namespace).model(model))


async def serve_card(home: CommandConnection, namespace: str, model: str) -> None:
    card = f'{{"model": "{model}", "max_model_len": 1000, "vocab_size": 50}}'
    await home.execute("HSET", Keys(namespace).models(), model, card)


async def answer(broker: Broker) -> None:
    claim = await claim_one(broker)
    await write(broker, claim, 0, 5)
    await write(broker, claim, 1, 6, end=FinishReason.STOP)


async def test_a_request_with_a_listener_is_kept_when_its_client_vanishes(
    pair: tuple[CommandConnection, Subscriber], own_cluster: ClusterTrio
) -> None:
    """A script counts listeners at its own node, for models at each of them."""
    commands, subscriber = pair
    for model in (await asyncio.to_thread(models_by_node, own_cluster, "penstock")).values():
        broker = Broker(commands, Keys().model(model))
        for name in ("heard", "unheard"):
            await broker.enqueue(name, b"payload", result_ttl_ms=60_000, client_id="gone", client_ttl_ms=1)
        await subscriber.subscribe(broker.keys.output("heard"), lambda data: None)
        # Clients are not judged before a reaper has looked for a while.
        await broker.reap(CAUSE, max_deliveries=3)
        await commands.execute("HSET", broker.keys.prefix + "reaper", "not_before", 0)
        await commands.execute("ZADD", broker.keys.clients, "XX", 0, "gone")

        async def is_cancelled(broker: Broker = broker) -> bool:
            await broker.reap(CAUSE, max_deliveries=3)
            return await broker.state("unheard") is RequestState.CANCELLED

        await until(is_cancelled)
        assert await broker.state("heard") is RequestState.QUEUED


async def test_commands_and_subscriptions_follow_a_slot(
    pair: tuple[CommandConnection, Subscriber], own_cluster: ClusterTrio
) -> None:
    commands, subscriber = pair
    keys = Keys().model("m")
    broker = Broker(commands, keys)
    messages: list[bytes] = []
    restored = asyncio.Event()
    await subscriber.subscribe(keys.wake, messages.append, restored.set)
    assert await broker.state("r") is None
    old_port = await asyncio.to_thread(own_cluster.port_of, keys.leases)
    new_port = next(port for port in own_cluster.ports if port != old_port)
    await asyncio.to_thread(own_cluster.hand_over, key_slot(keys.leases.encode()), new_port)
    assert await broker.enqueue("r", b"payload", result_ttl_ms=60_000) == NEW
    async with asyncio.timeout(DEADLINE_S):
        await restored.wait()
    await commands.execute("PUBLISH", keys.wake, "x")

    async def has_come() -> bool:
        return b"x" in messages

    await until(has_come)
    assert [claim.request_id for claim in (await broker.claim("e", EngineCapacity(max_num_seqs=1))).claims] == ["r"]
    # It is told by a node that was there before, to a process that comes now.
    other, _ = make_pair(own_cluster.url)
    assert await Broker(other, keys).state("r") is RequestState.CLAIMED
    await other.close()


async def test_streams_resume_after_a_node_dies_and_returns(
    redis_url: str, own_cluster: ClusterTrio, namespace: str
) -> None:
    """A stream waits for its model's node; other streams continue as far as the cluster allows."""
    shards = {"c": own_cluster.url}
    model = next(iter((await asyncio.to_thread(models_by_node, own_cluster, namespace)).values()))
    home = CommandConnection(redis_url)
    await serve_card(home, namespace, model)
    async with Client.connect(redis_url, namespace=namespace, shards=shards, retry_for_s=float("inf")) as client:
        broker = Broker(client._commands, Keys(namespace).model(model))

        async def read() -> list[int]:
            return [token async for delta in client.stream("hi", SamplingParams()) for token in delta.token_ids]

        reading = asyncio.create_task(read())
        claim = await claim_one(broker)
        await until_followed(client._commands, broker, claim)
        await write(broker, claim, 0, 1)
        port = await asyncio.to_thread(own_cluster.port_of, broker.keys.leases)
        await asyncio.to_thread(own_cluster.kill, port)
        writing = asyncio.create_task(write(broker, claim, 1, 2, end=FinishReason.STOP))
        done, _ = await asyncio.wait([writing, reading], timeout=0.5)
        assert not done
        await asyncio.to_thread(own_cluster.revive, port)
        await writing
        assert await reading == [1, 2]
    await home.close()


async def test_a_model_moves_into_a_cluster_and_out(redis_url: str, namespace: str, cluster: ClusterTrio) -> None:
    servers = make_servers(redis_url, {"c": cluster.url})
    mover, keys = ShardMover(servers, Keys(namespace)), Keys(namespace).model("m")
    broker = Broker(servers["home"], keys)
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    await mover.move("m", "c")
    assert await Broker(servers["c"], keys).state("r") is RequestState.QUEUED
    await mover.move("m", "home")
    assert [claim.request_id for claim in (await broker.claim("e", EngineCapacity(max_num_seqs=1))).claims] == ["r"]
    for server in servers.values():
        await server.close()


async def test_a_cluster_is_checked_node_by_node(redis_url: str, own_cluster: ClusterTrio) -> None:
    shards = {"c": own_cluster.url}
    await check_servers(redis_url, shards, for_worker=True)
    port = own_cluster.ports[-1]
    await asyncio.to_thread(own_cluster.do, port, "CONFIG SET", "maxmemory", "100mb")
    await asyncio.to_thread(own_cluster.do, port, "CONFIG SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigurationError, match=rf":{port} drops keys when its memory is full") as caught:
        await check_servers(redis_url, shards, for_worker=True)
    assert "s3cret" not in str(caught.value)
    own_cluster.stop()
    with capture_logs() as logs:
        await check_servers(redis_url, shards, for_worker=True)
    assert [entry["event"] for entry in logs if entry["event"] == "shard_away"] == ["shard_away"]


async def test_home_cannot_be_a_cluster(cluster: ClusterTrio) -> None:
    with pytest.raises(ConfigurationError, match=r"the home Redis cannot be a cluster.*PENSTOCK_SHARDS"):
        await check_redis(cluster.url)
    for port in cluster.ports:
        with pytest.raises(RedisUnsupportedError, match=r"is a node of a cluster.*redis\+cluster://"):
            await check_redis(f"redis://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["redis+cluster://", "redis+cluster://h:x", "redis+cluster://h:1/2"])
def test_urls_that_cannot_be_read_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="it must be redis\\+cluster://HOST:PORT"):
        make_pair(url)
