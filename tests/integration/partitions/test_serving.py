"""An engine that serves several partitions: its home first, then where something waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from penstock.shared.broker import NEW, Broker, Queue, broker
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.keys import Keys
from penstock.shared.messages.core import Ready
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.partitions import Layouts
from penstock.shared.queue.policy import QueuePolicy
from penstock.shared.shards import make_connections
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.claiming import ClaimLoop
from penstock.worker.serving.core.client import CoreClient
from penstock.worker.serving.partitions.served_partitions import ServedPartition, ServedPartitions
from penstock.worker.serving.publisher import Publisher
from penstock.worker.serving.redis_waiting import RedisPressure
from penstock.worker.serving.reporting.engine_meter import EngineMeter
from penstock.worker.serving.reporting.observers import RequestLog
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.serving.requests.running_generations import RunningGenerations
from penstock.worker.text.tokenizer import TextCodec

from ...processes import DEADLINE_S
from ..client.harness import until
from ..shards.conftest import Deployment
from ..shards.conftest import place as place_at
from .conftest import MODEL, Parts

MAX_NUM_SEQS = 4


@pytest.fixture
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


class Core:
    """An engine core that is given requests and runs none."""

    def __init__(self) -> None:
        self.request_ids: asyncio.Queue[str] = asyncio.Queue()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.request_ids.put_nowait((request.request_id or "").partition("#")[0])

    def abort_requests(self, core_ids: list[str]) -> None:
        """Runs none."""


class Engine:
    """The claiming half of a worker process."""

    def __init__(self, engine_id: str, commands: CommandConnection, keys: Keys) -> None:
        self.engine_id = engine_id
        self.core, self.live = Core(), RunningGenerations()
        layouts = Layouts(commands, keys)

        def make(number: int) -> ServedPartition:
            broker = Broker(commands, keys.model(MODEL, number), number)
            publisher = Publisher(broker, lambda request_id, epoch: None, EngineMeter())
            return ServedPartition(broker, publisher, RedisPressure(commands, broker.keys))

        self.parts = ServedPartitions(engine_id, make, lambda: layouts.read(MODEL))
        config = WorkerConfig(
            worker_id="w", engine_id=engine_id, redis_url="", engine=EngineConfig(model=MODEL), lease_ttl_s=600
        )
        self.loop = ClaimLoop(
            config, self.parts, cast(CoreClient, self.core), self.live, RequestLog(MODEL, is_on=False)
        )

    @asynccontextmanager
    async def claiming(self, codec: TextCodec, subscriber: Subscriber) -> AsyncIterator[None]:
        sizes: dict[str, Any] = {
            "max_model_len": 100,
            "num_blocks": 100,
            "block_size": 16,
            "vocab_size": 100,
            "kv_cache_size_tokens": 1600,
        }
        ready = Ready(
            model_folder="",
            architecture="",
            dtype="",
            device="",
            eos_token_ids=[],
            max_num_seqs=MAX_NUM_SEQS,
            **sizes,
        )
        await self.parts.refresh()
        for part in self.parts:

            def wake(_: object = None, part: ServedPartition = part) -> None:
                self.loop.wake_at(part)

            await subscriber.subscribe(part.broker.keys.engine_wake(self.engine_id), wake, wake)
        running = asyncio.create_task(self.loop.run(Intake(codec, ready), ready))
        try:
            yield
        finally:
            self.loop.stop()
            await running

    def end(self, request_id: str) -> None:
        self.live.remove(request_id)
        self.loop.wake()


async def enqueue(
    parts: Parts, number: int, *request_ids: str, num_prompt_tokens: int = 1, digests: tuple[str, ...] = ()
) -> None:
    request = EngineCoreRequest(request_id="", prompt_token_ids=[5], sampling_params=SamplingParams(seed=1))
    for request_id in request_ids:
        payload = msgspec.msgpack.encode(msgspec.structs.replace(request, request_id=request_id))
        options: dict[str, Any] = {"max_tokens": 4, "num_prompt_tokens": num_prompt_tokens}
        options |= {"layout": parts.layout.version, "digests": digests, "own_digests": digests}
        assert await parts[number].enqueue(request_id, payload, result_ttl_ms=60_000, **options) == NEW


async def next_ids(engine: Engine, count: int) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        return [await engine.core.request_ids.get() for _ in range(count)]


async def lease(parts: Parts, *engine_ids: str) -> None:
    """Lease requests like engines that are busy for ever."""
    for engine_id in engine_ids:
        await parts[0].renew(engine_id, [], lease_ttl_ms=600_000)


@pytest.fixture
async def subscriber(place: tuple[str, dict[str, str]], namespace: str) -> AsyncIterator[Subscriber]:
    commands, subscriber = make_connections(*place, Keys(namespace))
    await subscriber.open()
    yield subscriber
    await subscriber.close()
    await commands.close()


async def test_an_engine_serves_its_home_partition_first_and_then_the_fullest(
    commands: CommandConnection, parts: Parts, codec: TextCodec, subscriber: Subscriber
) -> None:
    await parts.grow(3)
    await lease(parts, "a", "c")  # so that "b" has the second partition as its home
    await enqueue(parts, 0, "small")
    await enqueue(parts, 1, "home0", "home1")
    await enqueue(parts, 2, "large0", "large1", "large2")
    engine = Engine("b", commands, parts.keys)
    async with engine.claiming(codec, subscriber):
        assert await next_ids(engine, MAX_NUM_SEQS) == ["home0", "home1", "large0", "large1"]
        engine.end("home0")
        engine.end("home1")
        assert sorted(await next_ids(engine, 2)) == ["large2", "small"]


async def test_a_request_in_any_partition_wakes_an_engine_with_capacity(
    commands: CommandConnection,
    parts: Parts,
    codec: TextCodec,
    subscriber: Subscriber,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Polling is disabled, because an engine that polls would find every request in time."""
    monkeypatch.setattr(broker, "IDLE_POLL_S", 3600.0)
    await parts.grow(3)
    engine = Engine("a", commands, parts.keys)
    async with engine.claiming(codec, subscriber):

        async def is_waiting() -> bool:
            return all(part.has_our_capacity for part in engine.parts)

        await until(is_waiting)
        for number in (2, 0, 1):
            await enqueue(parts, number, f"r{number}")
            assert await next_ids(engine, 1) == [f"r{number}"]


async def test_a_full_engine_is_counted_on_at_home_alone(
    commands: CommandConnection, parts: Parts, codec: TextCodec, subscriber: Subscriber
) -> None:
    """Elsewhere others would leave requests to it, and wakes would be lost with it."""
    await parts.grow(2)
    await lease(parts, "b")
    engine = Engine("a", commands, parts.keys)
    async with engine.claiming(codec, subscriber):

        async def counts_on_it() -> bool:
            return await commands.execute("HEXISTS", parts[1].keys.prefix + "rooms", "a") == 1

        async def counts_on_it_no_more() -> bool:
            return not await counts_on_it()

        await until(counts_on_it)
        await enqueue(parts, 0, *(f"r{number}" for number in range(MAX_NUM_SEQS)))
        await next_ids(engine, MAX_NUM_SEQS)
        await until(counts_on_it_no_more)
        engine.end("r0")
        await until(counts_on_it)


async def test_a_conversation_returns_to_its_engine_outside_its_home_partition(
    commands: CommandConnection,
    parts: Parts,
    codec: TextCodec,
    subscriber: Subscriber,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Polling is disabled and a skipped warm request is never taken by another engine, unless its engine is full."""
    monkeypatch.setattr(broker, "IDLE_POLL_S", 3600.0)
    await Queue(commands, parts.keys.model(MODEL)).configure(QueuePolicy(affinity_ms=60_000))
    await parts.grow(2)
    await lease(parts, "a", "b")
    warm, home = Engine("a", commands, parts.keys), Engine("b", commands, parts.keys)
    talk = ("talk",)

    async def have_room(*engine_ids: bytes) -> bool:
        return sorted(await commands.execute("HKEYS", parts[1].keys.prefix + "rooms")) == [*engine_ids]

    async with warm.claiming(codec, subscriber):
        await enqueue(parts, 1, "first", digests=talk)
        assert await next_ids(warm, 1) == ["first"]
        async with home.claiming(codec, subscriber):
            await until(partial(have_room, b"a", b"b"))
            for number in range(1, MAX_NUM_SEQS):
                await enqueue(parts, 1, f"turn{number}", digests=talk)
                assert await next_ids(warm, 1) == [f"turn{number}"]
            await until(partial(have_room, b"b"))
            await enqueue(parts, 1, "last", digests=talk)
            assert await next_ids(home, 1) == ["last"]


async def test_partitions_of_an_engine_that_dies_go_to_the_others(
    commands: CommandConnection, parts: Parts, codec: TextCodec, subscriber: Subscriber
) -> None:
    """An engine with a busy home serves the other partition too when no other engine does."""
    await parts.grow(2)
    await lease(parts, "b")
    waiting = [f"home{number}" for number in range(40)]
    await enqueue(parts, 0, *waiting)
    await enqueue(parts, 1, "other")
    engine = Engine("a", commands, parts.keys)
    async with engine.claiming(codec, subscriber):
        for request_id in await next_ids(engine, 8 - MAX_NUM_SEQS):
            assert request_id.startswith("home")
        await commands.execute("ZREM", parts[0].keys.leases, "b")
        await engine.parts.refresh()
        running = waiting[:MAX_NUM_SEQS]
        seen: list[str] = []
        while "other" not in seen:
            engine.end(running.pop(0))
            running += await next_ids(engine, 1)
            seen.append(running[-1])
        assert len(seen) < 20


async def test_an_engine_serves_a_leaving_partition_until_it_is_empty(
    commands: CommandConnection, parts: Parts, codec: TextCodec, subscriber: Subscriber
) -> None:
    await parts.grow(2)
    engine = Engine("a", commands, parts.keys)
    async with engine.claiming(codec, subscriber):
        await enqueue(parts, 1, "r0")
        await parts.grow(1)
        assert await next_ids(engine, 1) == ["r0"]
        await engine.parts.refresh()
        assert engine.parts.drop_retired(lambda part: False) == []
        await parts[1].cancel("r0")
        await parts[1].forget("r0")
        await parts.grow(1)
        await engine.parts.refresh()
        assert engine.parts.drop_retired(lambda part: bool(engine.live.claims(part.number))) == []
        engine.end("r0")
        (dropped,) = engine.parts.drop_retired(lambda part: bool(engine.live.claims(part.number)))
        assert dropped.number == 1
        assert [part.number for part in engine.parts.homes()] == [0]


async def test_an_engine_that_keeps_its_cache_for_a_large_request_takes_nothing_elsewhere(
    commands: CommandConnection, parts: Parts, codec: TextCodec, subscriber: Subscriber
) -> None:
    await parts.grow(2)
    await lease(parts, "b")
    await enqueue(parts, 0, "large0", "large1", num_prompt_tokens=1000)
    await enqueue(parts, 1, "small")
    engine = Engine("a", commands, parts.keys)
    async with engine.claiming(codec, subscriber):
        assert await next_ids(engine, 1) == ["large0"]
        engine.end("large0")
        assert await next_ids(engine, 2) == ["large1", "small"]


@pytest.mark.parametrize("place", ["shards"], indirect=True)
async def test_an_unreachable_partition_does_not_block_the_others(
    deployment: Deployment, parts: Parts, commands: CommandConnection, codec: TextCodec, subscriber: Subscriber
) -> None:
    home = CommandConnection(deployment.url)
    await place_at(home, MODEL, "a", parts.keys)
    await place_at(home, f"{MODEL}#1", "b", parts.keys)
    await home.close()
    await parts.grow(2)
    engine = Engine("e", commands, parts.keys)
    async with engine.claiming(codec, subscriber):
        await enqueue(parts, 1, "before")
        assert await next_ids(engine, 1) == ["before"]
        deployment.servers["b"].send(signal.SIGSTOP)
        for number in range(3):
            await enqueue(parts, 0, f"r{number}")
            assert await next_ids(engine, 1) == [f"r{number}"]
        deployment.servers["b"].send(signal.SIGCONT)
        engine.end("r0")
        await enqueue(parts, 1, "after")
        assert await next_ids(engine, 1) == ["after"]
