"""A worker ends in the middle of generations; the next one continues after the last token that was delivered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, Delta, SamplingParams

from ..gate import Gate
from ..processes import DEADLINE_S, kill_at_once
from .conftest import Start
from .watching import PARAMS as WATCHED_PARAMS
from .watching import Watched, all_under_way, beating, engines, finish, undisturbed, until

NUM_TOKENS = 100
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, min_tokens=NUM_TOKENS),
]
PROMPT = "count from four to nine:"


@pytest.fixture
def stack(gate: Gate) -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--drain-timeout", "0.2"]
    with LocalStack(MODEL, options) as stack:
        yield stack


async def terminate(stack: LocalStack) -> None:
    """Send SIGTERM to the supervisor: the drain is too short for the running requests."""
    os.kill(stack.workers[0].pid, signal.SIGTERM)


async def kill_core(stack: LocalStack) -> None:
    """kill -9 of the engine core; its worker process hands the requests back."""
    (beat,) = await beating(stack.url, 1)
    os.kill(beat.core_pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [terminate, kill_core])
async def test_generations_resume_at_the_next_worker_without_gap_or_repeat(
    stack: LocalStack, gate: Gate, end: Callable[[LocalStack], Awaitable[None]]
) -> None:
    async with Client.connect(stack.url) as client:
        undisturbed = [(await client.generate(PROMPT, params)).outputs[0] for params in PARAMS]
        gate.hold_at(NUM_TOKENS - 1)
        outputs: list[list[Delta]] = [[] for _ in PARAMS]
        running = [
            asyncio.create_task(collect(client.stream(PROMPT, params), into))
            for params, into in zip(PARAMS, outputs, strict=True)
        ]
        async with asyncio.timeout(DEADLINE_S):
            while any(not deltas or deltas[-1].next_index < 20 for deltas in outputs):
                await asyncio.sleep(0.005)
        await end(stack)
        await asyncio.to_thread(stack.stop_worker)
        gate.open()
        await asyncio.to_thread(stack.start_worker)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*running)
    for deltas, whole in zip(outputs, undisturbed, strict=True):
        indexes = [delta.index + i for delta in deltas for i in range(len(delta.token_ids))]
        assert indexes == list(range(NUM_TOKENS))
        assert [delta.finish_reason for delta in deltas if delta.finished] == ["length"]
        assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
        assert "".join(delta.text for delta in deltas) == whole.text


async def collect(stream: AsyncIterator[Delta], into: list[Delta]) -> None:
    async for delta in stream:
        into.append(delta)  # noqa: PERF401 - the test looks at what has come so far


async def test_nothing_is_lost_when_drains_meet_a_burst(stack: LocalStack) -> None:
    """Requests keep coming while workers leave: a wave claimed in the last moment must keep an owner."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    async with Client.connect(stack.url) as client:
        expected = (await client.generate(PROMPT, params)).text
        answers: list[asyncio.Task[str]] = []

        async def ask() -> str:
            return (await client.generate(PROMPT, params)).text

        for number in range(1, 4):
            stopping = asyncio.create_task(asyncio.to_thread(stack.stop_worker))
            while not stopping.done() or len(answers) < 40 * number:
                answers.append(asyncio.create_task(ask()))
                # A machine that takes long to stop a worker is not given the more to do.
                await asyncio.sleep(0.002 if len(answers) < 200 * number else 0.2)
            await stopping
            await asyncio.to_thread(stack.start_worker)
        async with asyncio.timeout(DEADLINE_S):
            texts = await asyncio.gather(*answers)
    assert set(texts) == {expected}


async def test_streams_stay_whole_while_a_deployment_shrinks(start: Start, gate: Gate) -> None:
    """Three hosts become one under load: the first gets SIGTERM, and has less time than its requests need; the second
    is killed.
    """
    stack = await start(3, "--deterministic", "--drain-timeout", "0.2")
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, WATCHED_PARAMS)
        watched: list[Watched] = []

        async def more_streams(num_tokens: int) -> None:
            """Others come while the first ones run; none of them ends."""
            gate.hold_at(num_tokens)
            watched.extend(Watched(client.stream(PROMPT, params)) for params in WATCHED_PARAMS)
            await all_under_way(watched, num_tokens - 10)

        await more_streams(12)
        await asyncio.to_thread(stack.workers[0].stop)
        async with asyncio.timeout(DEADLINE_S):
            while len(await engines(stack.url)) != 2:
                await asyncio.sleep(0.05)
        await more_streams(21)
        await kill_host(stack.url, stack.workers[1].pid)
        await asyncio.to_thread(stack.workers[1].await_end)
        await more_streams(30)
        await finish(watched, whole * 3, gate)
        await until(lambda: not stack.workers[1].is_running)
        async with asyncio.timeout(DEADLINE_S):
            while len(beats := await engines(stack.url)) != 1:
                await asyncio.sleep(0.05)
        (left,) = beats
    assert left.supervisor_pid == stack.workers[2].pid


async def kill_host(url: str, supervisor_pid: int) -> None:
    """kill -9 of one of two supervisors and all that it has started, at once."""
    (beat,) = [beat for beat in await beating(url, 2) if beat.supervisor_pid == supervisor_pid]
    kill_at_once((supervisor_pid, beat.worker_pid, beat.core_pid))
