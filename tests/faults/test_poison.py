"""A request that kills its engine each time is parked; those that shared its batch are not harmed."""

from __future__ import annotations

import asyncio

import pytest

from penstock.ops.cli import main as penstock
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, CompletionOutput, PenstockError, SamplingParams
from penstock.shared.broker import Broker, DeadLetter
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeadRequest
from penstock.shared.errors import PoisonRequestError, RequestFailedError
from penstock.shared.keys import Keys

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .faulty_model import ABORT, HANG, KILL, RAISE
from .watching import PROMPT, Watched, all_under_way, beating

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


async def parked(stack: LocalStack) -> list[DeadRequest]:
    commands = CommandConnection(stack.url)
    try:
        return await DeadLetter(commands, Keys().model("demo")).list()
    finally:
        await commands.close()


async def until_claimed(client: Client, request_id: str) -> None:
    """Wait until an engine has taken a request: it may have been the end of one since, and wait for another."""
    async with asyncio.timeout(DEADLINE_S):
        while not (await client.status(request_id)).num_attempts:
            await asyncio.sleep(0.005)


async def test_poison_is_parked_and_its_neighbours_are_served(start_faulty: Start, gate: Gate) -> None:
    stack = await start_faulty(2, "--stall-timeout", "5", "--deterministic")
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(PROMPT, PARAMS)).outputs[0]
        for sign, words in ((ABORT, "SIGABRT"), (HANG, "no step"), (KILL, "SIGKILL")):
            dead = await await_parking(client, stack, gate, sign, whole)
            assert (dead.deaths, dead.deliveries) == (3, 3)
            assert dead.cause is not None
            assert words in dead.cause.reason
            assert dead.cause.engine_id
            assert len(dead.input_hash) == 64
            if sign == ABORT:
                assert "modeling_faulty.py" in dead.cause.trace


async def await_parking(
    client: Client, stack: LocalStack, gate: Gate, sign: str, whole: CompletionOutput
) -> DeadRequest:
    """Send a poison request next to six healthy ones, whose answers must equal ``whole``."""
    gate.hold_at(NUM_TOKENS - 1)
    innocents = [Watched(client.stream(PROMPT, PARAMS)) for _ in range(6)]
    await all_under_way(innocents, 2)
    poison = await client.submit(f"{PROMPT} {sign}", PARAMS)
    await until_claimed(client, poison.request_id)
    gate.open()  # a suspect runs alone until it has ended
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(PoisonRequestError, match="parked"):
            await poison.result()
        await asyncio.gather(*(one.task for one in innocents))
    for one in innocents:
        one.check(whole)
    (dead,) = [dead for dead in await parked(stack) if dead.request_id == poison.request_id]
    return dead


async def test_max_deliveries_and_the_dead_command(start_faulty: Start, capsys: pytest.CaptureFixture[str]) -> None:
    stack = await start_faulty(1, "--max-deliveries", "1")

    def dead(*arguments: str) -> str:
        assert penstock(["dead", *arguments, "--redis-url", stack.url]) == 0
        return capsys.readouterr().out

    async with Client.connect(stack.url) as client:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PoisonRequestError):
                await client.generate(f"{PROMPT} {ABORT}", PARAMS, request_id="p1")
            assert "p1" in await asyncio.to_thread(dead, "list")
            output = await asyncio.to_thread(dead, "show", "p1")
            assert "SIGABRT" in output
            assert PROMPT in output
            await asyncio.to_thread(dead, "replay", "p1")
            with pytest.raises(PoisonRequestError):
                await (await client.handle("p1")).result()
        await asyncio.to_thread(dead, "purge", "p1")
        assert "p1" not in await asyncio.to_thread(dead, "list")


async def test_an_exception_for_one_request_fails_that_one_alone(start_faulty: Start, gate: Gate) -> None:
    stack = await start_faulty(1, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(PROMPT, PARAMS)).outputs[0]
        gate.hold_at(NUM_TOKENS - 1)
        innocents = [Watched(client.stream(PROMPT, PARAMS)) for _ in range(4)]
        await all_under_way(innocents, 2)
        with pytest.raises(RequestFailedError, match="RuntimeError"):
            await client.generate(f"{PROMPT} {RAISE}", PARAMS)
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(one.task for one in innocents))
        for one in innocents:
            one.check(whole)
        (beat,) = await beating(stack.url, 1)
        assert beat.num_restarts == 0


async def test_undecodable_requests_are_parked(start_faulty: Start) -> None:
    stack = await start_faulty(1)
    commands = CommandConnection(stack.url)
    keys = Keys().model("demo")
    broker = Broker(commands, keys)
    async with Client.connect(stack.url) as client:
        await broker.enqueue("garbled", b"\xc1nonsense", result_ttl_ms=60_000)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PenstockError, match="not a request that this worker can decode"):
                await (await client.handle("garbled")).result()
        assert await broker.state("garbled") == "parked"
    await commands.close()
    (dead,) = await parked(stack)
    assert (dead.request_id, dead.payload) == ("garbled", b"\xc1nonsense")
