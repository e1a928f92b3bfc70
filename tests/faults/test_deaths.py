"""Any process may be killed with -9 at any moment: the subscriber sees no gap, no repeat, and one end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.broker import Broker, RequestFilter
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.queue.lifecycle import EventKind

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import LONG, PARAMS, PROMPT, Watched, beating, busiest, finish, start_streams, undisturbed, until


async def kill_busy(stack: LocalStack, role: str) -> EngineHeartbeat:
    """kill -9 of the core, worker process or supervisor of an engine that runs something; returns which."""
    beat = await busiest(stack.url)
    os.kill(getattr(beat, f"{role}_pid"), signal.SIGKILL)
    return beat


@pytest.mark.parametrize("role", ["core", "worker", "supervisor"])
async def test_generations_resume_at_another_engine(start: Start, gate: Gate, role: str) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 3)
        await kill_busy(stack, role)
        await finish(watched, whole, gate)


@pytest.mark.parametrize("role", ["core", "worker"])
async def test_generations_resume_at_the_restarted_engine(start: Start, gate: Gate, role: str) -> None:
    stack = await start(1, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        await kill_busy(stack, role)
        await finish(watched, whole, gate)
        (beat,) = await beating(stack.url, 1)
    assert beat.num_restarts == 1
    for one in watched:
        first, last = (stats for delta in one.deltas if (stats := delta.stats) is not None)
        assert last.num_deliveries == 2
        assert last.time_to_first_token_s == first.time_to_first_token_s
        assert first.latency_s < last.latency_s


async def test_each_answer_of_a_request_resumes_at_the_restarted_engine(start: Start, gate: Gate) -> None:
    stack = await start(1, "--deterministic")
    # Hot, or answers that are so short would be the same.
    params = msgspec.structs.replace(PARAMS[1], n=3, temperature=2.0)
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(PROMPT, params)).outputs
        gate.hold_at(LONG - 1)
        merged = Watched(client.stream(PROMPT, params))
        await until(lambda: min(map(merged.num_tokens_of, range(3))) >= 20, what="the answers do not start")
        await kill_busy(stack, "core")
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await merged.task
        (beat,) = await beating(stack.url, 1)
    assert beat.num_restarts == 1
    assert len({answer.text for answer in whole}) == 3
    for answer in whole:
        merged.check(answer)


async def test_generations_resume_after_redis_was_killed(start: Start, gate: Gate) -> None:
    stack = await start(1, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        await asyncio.to_thread(stack.kill_redis)
        await asyncio.to_thread(stack.restart_redis)
        await finish(watched, whole, gate)
        (beat,) = await beating(stack.url, 1)
    assert beat.num_restarts == 0


async def test_a_generation_killed_after_every_token_is_the_undisturbed_one(start: Start, gate: Gate) -> None:
    """For every k: a kill -9 of the core after the k-th token of a short generation, greedy and seeded."""
    num_tokens = 8
    stack = await start(2, "--deterministic")
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=num_tokens, ignore_eos=True),
    ]
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, params)
        for k in range(1, num_tokens):
            gate.hold_at(k)
            watched = [Watched(client.stream(PROMPT, one)) for one in params]
            await until(lambda k=k, watched=watched: all(one.num_tokens == k for one in watched))
            await kill_busy(stack, "core")
            await finish(watched, whole, gate)


async def test_a_timeline_crosses_two_deaths(start: Start, gate: Gate) -> None:
    """Its events name each engine, and the token behind which the next took over; they end once."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, [params])
        gate.hold_at(2)
        watched = Watched(client.stream(PROMPT, params, request_id="twice"))
        holders: list[str] = []
        for k in (2, 5):
            gate.hold_at(k)
            await until(lambda k=k: watched.num_tokens == k)
            holders.append((await kill_busy(stack, "core")).engine_id)
        await finish([watched], whole, gate)
        events = await client.history("twice")
        (listed,) = await client.requests(RequestFilter(states=("finished",), id_prefix="twice"))
    assert [(event.kind.value, event.num_output_tokens) for event in events] == [
        ("queued", 0),
        ("claimed", 0),
        ("reclaimed", 2),
        ("claimed", 2),
        ("reclaimed", 5),
        ("claimed", 5),
        ("finished", 8),
    ]
    claims = [event for event in events if event.kind is EventKind.CLAIMED]
    assert [event.engine_id for event in claims[:2]] == holders
    assert sorted(event.epoch for event in claims) == [event.epoch for event in claims]
    assert all("signal 9" in event.cause or "SIGKILL" in event.cause for event in events if event.kind == "reclaimed")
    assert (listed.num_output_tokens, listed.num_attempts, listed.engine_id) == (8, 3, events[-1].engine_id)


CLIENT = """
import asyncio, sys
from penstock.producer import Client, SamplingParams

async def main():
    async with Client.connect(sys.argv[1], lease_ttl_s=1.0) as client:
        long = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
        handle = await client.submit("spell 12:", long, request_id="detached")
        async for delta in client.stream("spell 12:", long, request_id="interactive"):
            print("streaming", flush=True)

asyncio.run(main())
"""


async def test_a_killed_clients_requests_end_and_a_detached_one_does_not(start: Start, gate: Gate) -> None:
    stack = await start(1)
    gate.hold_at(20)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, stack.url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.kill()
    await process.wait()
    commands = CommandConnection(stack.url)
    broker = Broker(commands, Keys().model("demo"))
    async with asyncio.timeout(DEADLINE_S):
        while await broker.state("interactive") != "cancelled":  # no one may listen to it, or it would continue
            await asyncio.sleep(0.05)
    await commands.close()
    gate.open()
    async with Client.connect(stack.url) as client:
        interactive = await (await client.handle("interactive")).result()
        assert interactive.outputs[0].finish_reason == "cancelled"
        detached = await client.handle("detached")
        async for delta in detached.stream():
            if delta.next_index > len(interactive.outputs[0].token_ids):
                break
        await detached.cancel()
