"""No engine, or none left: who waits, who is told, and what a client knows of it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import redis

from penstock.producer import LLM, Client, EngineDeadError, PoisonRequestError, SamplingParams
from penstock.producer.requests import health
from penstock.shared import errors
from penstock.shared.broker import Broker, Homes
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause, EngineHeartbeat, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import EngineState
from penstock.shared.swap.views import SleepLevel

from ...processes import DEADLINE_S
from ..conftest import LONG_MS
from .harness import CAUSE, claim_one, write


async def beat(
    commands: CommandConnection, namespace: str, index: int, state: EngineState, error: str = "", model: str = "m"
) -> None:
    keys, engine_id = Keys(namespace), f"w-{index}"
    heartbeat = EngineHeartbeat(
        worker_id="w", engine_id=engine_id, model=model, state=state, host="h", worker_pid=1, core_pid=2, error=error
    )
    await commands.execute("SADD", keys.engines(), engine_id)
    await commands.execute("SET", keys.engine(engine_id), msgspec.json.encode(heartbeat), "PX", 60_000)


async def kill_engine(broker: Broker, max_deliveries: int = 3) -> None:
    await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=max_deliveries)


@pytest.mark.parametrize("state", ["ready", "busy", "draining", "compiling", "sleeping"])
async def test_health_is_good_while_one_engine_lives(client, commands, namespace, state) -> None:
    await beat(commands, namespace, 0, EngineState.DEAD, "out of memory")
    await beat(commands, namespace, 1, EngineState(state))
    await client.check_health()
    assert (client.errored, client.is_running, client.is_stopped) == (False, True, False)
    assert isinstance(client.dead_error, EngineDeadError)


async def test_health_error_names_the_state_of_each_engine(client, commands, namespace) -> None:
    with pytest.raises(EngineDeadError, match="no live engine serves model 'm': it has no engine with a heartbeat"):
        await client.check_health()
    await beat(commands, namespace, 0, EngineState.DEAD, "CUDA error: an illegal memory access")
    await beat(commands, namespace, 1, EngineState.STARTING)
    await beat(commands, namespace, 2, EngineState.STALLED, "no step for 5 s")
    await beat(commands, namespace, 3, EngineState.READY, model="other")
    with pytest.raises(EngineDeadError) as caught:
        await client.check_health("m")
    for part in (
        "engine w-0 is dead (CUDA error: an illegal memory access)",
        "engine w-1 is starting",
        "engine w-2 is stalled (no step for 5 s)",
    ):
        assert part in str(caught.value)
    assert "w-3" not in str(caught.value)
    assert (client.errored, client.is_running, client.is_stopped) == (True, False, True)
    assert client.dead_error is caught.value
    await beat(commands, namespace, 0, EngineState.READY)
    await client.check_health()
    assert not client.errored
    with pytest.raises(errors.UnknownModelError):
        await client.check_health("typo")


async def test_a_model_that_a_device_may_wake_is_healthy_and_served(client, commands, broker: Broker) -> None:
    homes = Homes(commands, broker.keys)
    await homes.renew("gpu0", SleepLevel.DISK, 5.0, lease_ttl_ms=LONG_MS)
    await client.check_health()
    result = asyncio.ensure_future(client.generate("hi", SamplingParams(max_tokens=2), fail_fast=True))
    await write(broker, await claim_one(broker), 0, 1, 2, end=FinishReason.STOP)
    assert (await result).outputs[0].token_ids == [1, 2]
    await homes.leave("gpu0")


async def test_errored_follows_the_engines_while_it_is_read(
    client, commands, namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "INTERVAL_S", 0.01)

    async def until_errored(is_errored: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while client.errored is not is_errored:
                await asyncio.sleep(0.01)

    await beat(commands, namespace, 0, EngineState.READY)
    await client.check_health()
    await beat(commands, namespace, 0, EngineState.DEAD, "out of memory")
    await until_errored(True)
    assert "out of memory" in str(client.dead_error)
    await beat(commands, namespace, 0, EngineState.BUSY)
    await until_errored(False)
    # Nobody reads it any more.
    monkeypatch.setattr(health, "LINGER_S", 0.0)
    async with asyncio.timeout(DEADLINE_S):
        while client._health_watch._watching is not None:
            await asyncio.sleep(0.01)
    await beat(commands, namespace, 0, EngineState.DEAD)
    assert client.errored is False
    monkeypatch.setattr(health, "LINGER_S", 60.0)
    await until_errored(True)


async def test_a_client_that_is_not_connected_does_not_run(redis_url: str) -> None:
    client = Client.connect(redis_url)
    assert (client.is_running, client.is_stopped, client.errored) == (False, True, False)


async def test_fail_fast_is_refused_at_once_with_the_cause(client, broker, commands, namespace) -> None:
    await beat(commands, namespace, 0, EngineState.DEAD, "out of memory")
    for call in (client.generate, client.submit):
        with pytest.raises(EngineDeadError, match=r"engine w-0 is dead \(out of memory\)"):
            await call("hi", fail_fast=True, request_id="r")
    assert client.errored
    assert "out of memory" in str(client.dead_error)
    assert await broker.state("r") is None


async def test_an_engine_that_beats_without_a_lease_takes_nothing(client, commands, namespace) -> None:
    await beat(commands, namespace, 0, EngineState.READY)
    with pytest.raises(EngineDeadError, match="none of its engines holds a lease"):
        await client.generate("hi", fail_fast=True)


async def test_the_option_of_a_request_goes_before_the_clients(redis_url, namespace, broker, commands) -> None:
    async with Client.connect(redis_url, namespace=namespace, fail_fast=True) as client:
        with pytest.raises(EngineDeadError, match="it has no engine with a heartbeat or a lease"):
            await client.submit("hi")
        assert client.errored
        await beat(commands, namespace, 0, EngineState.READY)
        waiting = asyncio.ensure_future(client.generate("hi", fail_fast=False))
        await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)
        assert (await waiting).text == "A"
        assert not client.errored, "a new token shows that somebody serves the model"
        # The claim has given the engine a lease.
        accepted = asyncio.ensure_future(client.generate("hi"))
        await write(broker, await claim_one(broker), 0, 66, end=FinishReason.STOP)
        assert (await accepted).text == "B"


@pytest.mark.parametrize("is_detached", [False, True])
async def test_an_accepted_request_ends_with_the_last_engine(client, broker, is_detached) -> None:
    await broker.renew("e0", [])
    if is_detached:
        handle = await client.submit("hi", SamplingParams(), fail_fast=True)
        ending = asyncio.ensure_future(handle.result())
    else:
        ending = asyncio.ensure_future(client.generate("hi", fail_fast=True))
    await write(broker, await claim_one(broker), 0, 65)
    await kill_engine(broker)
    with pytest.raises(EngineDeadError, match="no engine is left that serves this model; the last was e0"):
        await ending
    assert client.errored


async def test_without_fail_fast_a_request_waits_for_the_next_engine(client, broker) -> None:
    waiting = asyncio.ensure_future(client.generate("hi"))
    await write(broker, await claim_one(broker), 0, 65)
    await kill_engine(broker)
    claim = await claim_one(broker)
    await write(broker, claim, 1, 66, end=FinishReason.STOP)
    assert (await waiting).text == "AB"
    assert not client.errored


async def test_a_poison_request_raises_in_all_waiting_calls(client: Client, broker: Broker) -> None:
    stream = client.stream("hi", request_id="r")
    streamed = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    generated = asyncio.ensure_future(client.generate("hi", request_id="r"))
    handled = asyncio.ensure_future((await client.handle("r")).result())
    await write(broker, claim, 0, 65)
    assert (await streamed).text == "A"
    cause = DeathCause(engine_id="e0", reason="killed by signal 11")
    assert await broker.reclaim("e0", cause, is_external=False, max_deliveries=1) == (0, 1)
    for waiting in (anext(stream), generated, handled):
        with pytest.raises(PoisonRequestError, match="it is parked: see penstock dead show r"):
            await waiting
    assert not client.errored, "one poisoned request says nothing about the engines"


def test_the_blocking_face_has_the_same(redis_url: str, namespace: str) -> None:
    with redis.Redis.from_url(redis_url) as commands:
        commands.hset(Keys(namespace).models(), "m", msgspec.json.encode(ModelCard(model="m")).decode())
    with LLM(redis_url, namespace=namespace, fail_fast=True) as llm:
        with pytest.raises(EngineDeadError, match="no live engine serves model 'm'"):
            llm.generate("hi")
        with pytest.raises(EngineDeadError, match="no live engine serves model 'm'"):
            llm.check_health()


@pytest.mark.parametrize("value", ["yes", 1])
async def test_fail_fast_is_true_or_false(redis_url: str, client: Client, value: object) -> None:
    with pytest.raises(errors.ValidationError, match="fail_fast must be True or False"):
        Client(redis_url, fail_fast=value)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(errors.ValidationError, match="fail_fast must be True or False"):
        await client.submit("hi", fail_fast=value)  # type: ignore[arg-type]  # the mistake under test
