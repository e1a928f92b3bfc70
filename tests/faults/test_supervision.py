"""Dead, stalled and busy processes are distinguished; a process that was stopped and wakes up can do no harm."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.errors import EngineDeadError

from ..gate import Gate
from ..processes import DEADLINE_S, is_gone, resume
from .conftest import Start
from .faulty_model import BUSY_THREAD, HOLD_GIL
from .watching import (
    LONG,
    PARAMS,
    PROMPT,
    Watched,
    all_under_way,
    beating,
    busiest,
    finish,
    log_of,
    start_streams,
    until,
)

# Longer than everybody's patience: leases 1 to 3 s, a connection on which nothing comes 5 s, stalls 10 s.
STOP_S = 12.0
# Longer than any lease and heartbeat lives, so that a core that cannot answer for so long is seen by all who look.
GIL_S = 4.0
# Log lines about an engine that was ended, or about the reason.
ENDS = ("core_stalled", "engine_lost", "engine_given_up", "supervisor_paused", "worker_process_paused")
# Requests at once while the engine is kept busy, twice its capacity.
SATURATION_REQS = 32


def ends_in(log: str) -> list[str]:
    """The lines of a log that say why an engine was started again."""
    return [line for line in log.splitlines() if any(f'"event": "{event}"' in line for event in ENDS)]


async def test_a_paused_worker_that_wakes_after_its_requests_moved_is_refused(start: Start, gate: Gate) -> None:
    """The stall timeout is long, so no supervisor kills the zombie: the server's refusals alone keep it out."""
    stack = await start(2, "--deterministic", "--stall-timeout", "100")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 2)
        zombie = await busiest(stack.url)
        sleeper = psutil.Process(zombie.worker_pid)
        sleeper.suspend()
        await finish(watched, whole, gate)
        sleeper.resume()
        give_up_at = time.monotonic() + 150
        while "claim_stale" not in await log_of(stack):
            assert time.monotonic() < give_up_at, "the zombie was not refused"
            await asyncio.sleep(0.05)
        again = [Watched(client.stream(PROMPT, params)) for params in PARAMS * 2]
        await finish(again, whole, gate)
        assert {beat.num_restarts for beat in await beating(stack.url, 2)} == {0}


async def test_long_stops_do_no_harm(start: Start, gate: Gate) -> None:
    """A core, another engine's worker process, a third one's supervisor and a client, all at once; an engine lives."""
    stack = await start(4, "--deterministic", "--max-num-seqs", "8")  # room for the client's as well
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 6)
        async with running_client(stack.url) as (other, output):
            lines = [await output.readline() for _ in range(3)]
            victims = await beating(stack.url, 4)
            pids = [victims[0].core_pid, victims[1].worker_pid, victims[2].supervisor_pid, other.pid]
            await stop_for_long(pids)
            await finish(watched, whole, gate)
            lines += (await output.read()).splitlines()  # its request ended while it was stopped
            assert await other.wait() == 0
    check_lines(lines, CLIENT_TOKENS)


async def test_a_long_stop_of_redis_does_no_harm(start: Start, gate: Gate) -> None:
    stack = await start(1, "--deterministic", "--lease-ttl", "1")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 2)
        await stop_for_long([await asyncio.to_thread(stack.redis_pid)])
        await finish(watched, whole, gate)
        (beat,) = await beating(stack.url, 1)
    assert beat.num_restarts == 0


async def stop_for_long(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids]
    for stopped in processes:
        stopped.suspend()
    await asyncio.sleep(STOP_S)
    resume(processes)


CLIENT_TOKENS = 150
CLIENT = """
import asyncio, sys
from penstock.producer import Client, SamplingParams

async def main():
    async with Client.connect(sys.argv[1], lease_ttl_s=1.0) as client:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=int(sys.argv[3]), ignore_eos=True)
        async for delta in client.stream(sys.argv[2], params):
            print(delta.index, *delta.token_ids, delta.finish_reason or "", flush=True)

asyncio.run(main())
"""


@asynccontextmanager
async def running_client(url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Start a client in a process of its own and return it with its output: all that it sees of one request."""
    command = (sys.executable, "-c", CLIENT, url, PROMPT, str(CLIENT_TOKENS))
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert client.stdout is not None
    try:
        yield client, client.stdout
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()


def check_lines(lines: list[bytes], num_tokens: int) -> None:
    """Each token once and in order, and one end."""
    records = [line.split() for line in lines]
    position = 0
    for record in records:
        is_last = record is records[-1]
        assert int(record[0]) == position
        position += len(record) - (2 if is_last else 1)
        assert record[-1].isdigit() is not is_last
    assert position == num_tokens
    assert records[-1][-1] == b"length"


async def test_a_core_that_is_stopped_is_replaced_within_the_stall_timeout(start: Start, gate: Gate) -> None:
    stack = await start(1, "--stall-timeout", "5")
    gate.hold_at(LONG - 1)
    async with Client.connect(stack.url) as client:
        watched = [Watched(client.stream(PROMPT, PARAMS[0]))]
        await all_under_way(watched)
        beat = await busiest(stack.url)
        core = psutil.Process(beat.core_pid)
        core.suspend()
        await until(lambda: is_gone(core))
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            await watched[0].task


async def test_no_false_alarm_at_saturation(start_faulty: Start) -> None:
    """The core keeps the GIL, and computes next to its steps, both for longer than leases.

    The stall timeout is many times that: within it a core may do anything, on any machine.
    """
    stack = await start_faulty(1, "--stall-timeout", "100", gil_s=GIL_S)
    params = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True)
    async with Client.connect(stack.url) as client:
        before = await busiest(stack.url)
        is_over = False

        async def ask() -> None:
            while not is_over:
                await client.generate(PROMPT, params)

        async def faults() -> None:
            nonlocal is_over
            for sign in (HOLD_GIL, BUSY_THREAD):
                await client.generate(f"{PROMPT} {sign}", SamplingParams(max_tokens=2))
            await asyncio.sleep(GIL_S)  # for which the thread computes
            is_over = True

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(ask() for _ in range(SATURATION_REQS)), faults())
        after = await busiest(stack.url)
    assert after.num_restarts == 0, ends_in(await log_of(stack))
    assert (after.core_pid, after.worker_pid, after.num_restarts) == (before.core_pid, before.worker_pid, 0)
    assert after.step_counter > before.step_counter
    assert "core_stalled" not in await log_of(stack)


async def test_a_heartbeat_describes_the_engine(start: Start, gate: Gate) -> None:
    stack = await start(1)
    most = 20
    gate.hold_at(most)
    async with Client.connect(stack.url) as client:
        watched = Watched(client.stream(PROMPT, SamplingParams(temperature=1.0, max_tokens=1800, ignore_eos=True)))
        give_up_at = time.monotonic() + 150
        while (beat := await busiest(stack.url)).state != "busy" or not beat.tokens_per_s:
            assert time.monotonic() < give_up_at
            most += 1  # a few tokens in each second that a heartbeat tells of
            gate.hold_at(most)
            await asyncio.sleep(0.05)
        assert beat.num_running_reqs == 1
        assert beat.step_counter > 0
        assert 0 < beat.kv_cache_usage < 1
        assert beat.core_rss_bytes > beat.worker_rss_bytes > 10_000_000
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)
        give_up_at = time.monotonic() + 120
        while (beat := await busiest(stack.url)).state != "ready":
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.1)
        assert beat.num_running_reqs == 0


async def test_fail_fast_and_check_health_name_the_cause(start: Start) -> None:
    stack = await start(1)
    async with Client.connect(stack.url, fail_fast=True) as client:
        await client.check_health()
        assert not client.errored
        assert (await client.generate(PROMPT, SamplingParams(max_tokens=2))).text
        await asyncio.to_thread(stack.workers[0].stop)
        with pytest.raises(EngineDeadError):
            await client.generate(PROMPT)
        with pytest.raises(EngineDeadError):
            await client.check_health()
        assert client.errored
        assert client.dead_error is not None


async def test_a_cancelled_request_leaves_its_engine_without_another_token(start: Start, gate: Gate) -> None:
    stack = await start(1)
    gate.hold_at(5)
    async with Client.connect(stack.url) as client:
        handle = await client.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
        watched = Watched(handle.stream())
        await all_under_way([watched], 5)
        give_up_at = time.monotonic() + 150
        while not (await busiest(stack.url)).num_running_reqs:
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.05)
        await handle.cancel()
        await handle.cancel()
        await watched.task
        # It is held at five tokens: only the cancellation takes it out of the engine.
        while (await busiest(stack.url)).num_running_reqs:
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.05)
        assert watched.deltas[-1].finish_reason == "cancelled"
        assert watched.num_tokens == 5


async def test_nothing_is_left_when_supervisor_and_redis_are_both_killed(start: Start) -> None:
    """No process would stop such a worker process, and it cannot return its requests."""
    stack = await start(1)
    (beat,) = await beating(stack.url, 1)
    family = [psutil.Process(pid) for pid in (beat.worker_pid, beat.core_pid)]
    await asyncio.to_thread(stack.kill_redis)
    psutil.Process(beat.supervisor_pid).kill()
    await until(lambda: all(map(is_gone, family)))
