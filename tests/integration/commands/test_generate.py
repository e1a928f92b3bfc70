"""``penstock generate`` while nobody serves its model: it says so, and goes on by itself."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, Process

import msgspec
import pytest

from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Queue, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import EngineState

from ...processes import DEADLINE_S
from ...warm_python import light_python


@pytest.fixture
async def broker(commands: CommandConnection, namespace: str) -> Broker:
    """The engine, played by the test; the model was served once."""
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(ModelCard(model="m")))
    return Broker(commands, Keys(namespace).model("m"))


async def put_heartbeat(commands: CommandConnection, namespace: str) -> None:
    keys, state = Keys(namespace), EngineState.READY
    beat = EngineHeartbeat(worker_id="w", engine_id="w-0", model="m", state=state, host="h", worker_pid=1, core_pid=2)
    await commands.execute("SADD", keys.engines(), "w-0")
    await commands.execute("SET", keys.engine("w-0"), msgspec.json.encode(beat), "PX", 600_000)


async def generate(redis_url: str, namespace: str, *arguments: str) -> Process:
    command = ["-m", "penstock.ops.cli", "generate", *arguments, "--redis-url", redis_url, "--namespace", namespace]
    return await asyncio.create_subprocess_exec(light_python(), *command, stdout=PIPE, stderr=PIPE)


async def said(process: Process) -> str:
    """The next line on standard error."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        return (await process.stderr.readline()).decode().strip()


async def claim_one(broker: Broker) -> Claim:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if claims := (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims:
                return claims[0]
            await asyncio.sleep(0.01)


async def begin(broker: Broker, claim: Claim) -> None:
    assert await broker.append([Record(claim.request_id, claim.epoch, Delta(index=0, token_ids=[1], text="hel"))]) == []


async def end(broker: Broker, claim: Claim) -> None:
    delta = Delta(index=1, token_ids=[2], text="lo", finish_reason=FinishReason.STOP)
    assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []


async def ended(process: Process) -> tuple[str, str, int | None]:
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    return out.decode(), err.decode(), process.returncode


@pytest.mark.parametrize("options", [(), ("--stream",), ("--model", "m")])
async def test_it_reports_once_that_no_engine_serves_the_model(
    redis_url: str, namespace: str, broker: Broker, commands: CommandConnection, options: tuple[str, ...]
) -> None:
    process = await generate(redis_url, namespace, "hi", *options)
    assert await said(process) == "no engine serves 'm' now; the request waits in line; Ctrl-C cancels it"
    claim = await claim_one(broker)
    await begin(broker, claim)
    assert await said(process) == "an engine has taken it up"
    await put_heartbeat(commands, namespace)
    await end(broker, claim)
    assert await ended(process) == ("hello\n", "", 0)


async def test_it_reports_a_paused_queue(
    redis_url: str, namespace: str, broker: Broker, commands: CommandConnection
) -> None:
    queue = Queue(commands, Keys(namespace).model("m"))
    await queue.pause(put_back=False)
    process = await generate(redis_url, namespace, "hi")
    assert (await said(process)).startswith("the queue of 'm' is paused; the request waits")
    await queue.resume()
    claim = await claim_one(broker)
    await begin(broker, claim)
    await end(broker, claim)
    assert (await ended(process))[0] == "hello\n"


async def test_it_prints_no_notice_while_an_engine_serves(
    redis_url: str, namespace: str, broker: Broker, commands: CommandConnection
) -> None:
    await put_heartbeat(commands, namespace)
    process = await generate(redis_url, namespace, "hi")
    claim = await claim_one(broker)
    await begin(broker, claim)
    await end(broker, claim)
    assert await ended(process) == ("hello\n", "", 0)
