"""Two databases of one Redis with the same names in both: what is published in one is not heard in the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec
import pytest

from penstock.producer import Client, SamplingParams, SleepState
from penstock.shared.broker import Broker, EngineCapacity, Queue
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.orders import send_to_worker
from penstock.shared.deployment.records import DeathCause
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import StopCommand
from penstock.shared.queue.lifecycle import RequestState

from .harness import claim_one, until, write
from .test_engine_control import PlayedEngine

CAUSE = DeathCause(engine_id="e0", reason="it fell over")


class Deployment(NamedTuple):
    """A client on one database, and the connections by which the test plays its engines."""

    client: Client
    commands: CommandConnection
    subscriber: Subscriber
    keys: Keys
    broker: Broker


@pytest.fixture
async def both(redis_url: str, namespace: str) -> AsyncIterator[list[Deployment]]:
    async with AsyncExitStack() as stack:
        deployments: list[Deployment] = []
        for database in (0, 1):
            url, keys = f"{redis_url}?db={database}", Keys(namespace)
            commands, subscriber = CommandConnection(url), Subscriber(url)
            await subscriber.open()
            stack.push_async_callback(commands.close)
            stack.push_async_callback(subscriber.close)
            card = f'{{"model": "m", "max_model_len": 1000, "vocab_size": 50, "served_in": {database}}}'
            await commands.execute("HSET", keys.models(), "m", card)
            client = await stack.enter_async_context(Client.connect(url, namespace=namespace))
            deployments.append(Deployment(client, commands, subscriber, keys, Broker(commands, keys.model("m"))))
        yield deployments


async def barrier(deployment: Deployment) -> None:
    """Return when all that was published before this has come: Redis answers a connection in order."""
    subscription = await deployment.subscriber.subscribe(deployment.keys.model("m").output("barrier"), lambda _: None)
    deployment.subscriber.unsubscribe(subscription)


async def test_the_same_request_id_has_an_answer_in_each(both: list[Deployment]) -> None:
    params = SamplingParams(max_tokens=2)
    streams = [
        asyncio.create_task(one.client.generate("hi", params, request_id="same", tenant="t", timeout_s=600.0))
        for one in both
    ]
    claims = [await claim_one(one.broker) for one in both]
    for one, claim, token in zip(both, claims, (5, 6), strict=True):
        await write(one.broker, claim, 0, token)
    for one, claim, token in zip(both, claims, (7, 8), strict=True):
        await write(one.broker, claim, 1, token, end=FinishReason.STOP)
    outputs = [(await stream).outputs[0] for stream in streams]
    assert [output.token_ids for output in outputs] == [[5, 7], [6, 8]]


async def test_channels_are_separate_between_databases(both: list[Deployment]) -> None:
    here, there = both
    model = here.keys.model("m")
    channels = [model.output("r"), model.wake, model.engine_commands("e"), model.engine_wake("e")]
    channels += [model.call_replies("c"), model.group_waves("g"), here.keys.worker_commands("w")]
    heard: list[tuple[int, str, bytes]] = []
    for number, one in enumerate(both):
        for channel in channels:
            await one.subscriber.subscribe(
                channel, lambda data, number=number, channel=channel: heard.append((number, channel, data))
            )
    for channel in channels:
        for one, message in ((here, b"0"), (there, b"1")):
            assert await one.commands.execute("PUBSUB", "NUMSUB", channel) == [wire_name(one, channel), 1]
            assert await one.commands.execute("PUBLISH", channel, message) == 1
    for one in both:
        await barrier(one)
    assert sorted(heard) == sorted((number, channel, b"%d" % number) for number in (0, 1) for channel in channels)


def wire_name(deployment: Deployment, channel: str) -> bytes:
    return deployment.commands._channels.in_subscription(channel.encode())


async def test_scripts_wake_cancel_and_count_listeners_in_their_own(both: list[Deployment]) -> None:
    heard: list[tuple[int, str]] = []
    for number, one in enumerate(both):
        model = one.keys.model("m")
        for channel in (model.engine_commands("e0"), model.engine_wake("e0"), model.wake):
            await one.subscriber.subscribe(
                channel, lambda _, number=number, channel=channel: heard.append((number, channel))
            )
    here, there = both
    names = here.keys.model("m")
    for one in both:  # an engine with room for one, in both
        await one.broker.claim("e0", EngineCapacity(max_num_seqs=1))
    await here.broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    await here.broker.claim("e0", EngineCapacity(max_num_seqs=1))
    await here.broker.cancel("r")
    await Queue(there.commands, names).pause(put_back=False)
    await Queue(there.commands, names).resume()
    for one in both:
        await barrier(one)
    assert heard[:2] == [(0, names.engine_wake("e0")), (0, names.engine_commands("e0"))]
    assert set(heard[2:]) == {(1, names.wake)}

    # A listener in database 0 spares no request of a vanished client in database 1.
    await here.subscriber.subscribe(names.output("orphan"), lambda _: None)
    await there.broker.enqueue("orphan", b"payload", result_ttl_ms=60_000, client_id="gone", client_ttl_ms=1)

    async def is_cancelled() -> bool:
        await there.broker.reap(CAUSE, max_deliveries=3)
        await there.commands.execute("HSET", names.prefix + "reaper", "not_before", 0)
        return await there.broker.state("orphan") is RequestState.CANCELLED

    await until(is_cancelled)


async def test_control_calls_and_commands_to_workers_reach_their_own(both: list[Deployment]) -> None:
    engines = [PlayedEngine("w-0", one.commands, one.keys) for one in both]
    for number, (engine, one) in enumerate(zip(engines, both, strict=True)):
        engine.answer = lambda command, number=number: SleepState(number, ["weights"])
        await engine.beat()
        await engine.listen(one.subscriber)
    states = [await one.client.sleep_state() for one in both]
    assert states == [{"w-0": SleepState(number, ["weights"])} for number in (0, 1)]
    assert [len(engine.heard) for engine in engines] == [1, 1]

    commands: list[tuple[int, bytes]] = []
    for number, one in enumerate(both):
        await one.subscriber.subscribe(
            one.keys.worker_commands("w"), lambda data, number=number: commands.append((number, data))
        )
    await send_to_worker(both[1].commands.execute, both[1].keys, "w", StopCommand())
    for one in both:
        await barrier(one)
    assert commands == [(1, msgspec.msgpack.encode(StopCommand()))]
