"""The clock of Redis is set right, or a replica with another clock takes over, while requests run and a host dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.ops.lab.clusters.sentinel_trio import SentinelTrio, has_sentinel_mode
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ...gate import Gate
from ...moved_clock import MovedClock
from ...processes import DEADLINE_S, kill_at_once
from ..conftest import Start
from ..watching import PARAMS, PROMPT, beating, finish, start_streams

STEPS_S = (-3600.0, 3600.0)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """Clock of the Redis that ``start`` starts; a test names it before ``start``."""
    clock = MovedClock(tmp_path / "moved")
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(clock.program))
    return clock


class TrioOfClocks(SentinelTrio):
    """A primary, and replicas with another clock."""

    def __init__(self, folder: Path, by_s: float) -> None:
        super().__init__(folder)
        self._by_s = by_s
        self._own_program = self._program

    def _spawn(self, port: int, *arguments: str) -> None:
        self._program = self._own_program
        if "--replicaof" in arguments:
            clock = MovedClock(self._folder / "clocks", str(port))
            clock.move(self._by_s)
            self._program = str(clock.program)
        super()._spawn(port, *arguments)


@pytest.fixture
def trio(tmp_path: Path, by_s: float) -> Iterator[TrioOfClocks]:
    if not has_sentinel_mode(tmp_path):
        pytest.skip("the redis-server here cannot be a Sentinel")
    with TrioOfClocks(tmp_path / "redis", by_s) as trio:
        yield trio


async def kill_host(stack: LocalStack, number: int) -> None:
    """kill -9 of a ``worker start`` and all that it has started."""
    supervisor = psutil.Process(stack.workers[number].pid)
    family = await asyncio.to_thread(supervisor.children, recursive=True)
    await asyncio.to_thread(kill_at_once, [supervisor.pid, *(process.pid for process in family)])


@pytest.mark.parametrize("by_s", STEPS_S)
async def test_a_host_dies_while_the_clock_is_set(clock: MovedClock, start: Start, gate: Gate, by_s: float) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 3)
        clock.move(by_s)
        await kill_host(stack, 0)
        await finish(watched, whole, gate)
        assert [beat.num_restarts for beat in await beating(stack.url, 1)] == [0]


@pytest.mark.parametrize("by_s", STEPS_S)
async def test_live_engines_lose_nothing(clock: MovedClock, start: Start, gate: Gate, by_s: float) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 3)
        clock.move(by_s)
        late = asyncio.create_task(client.generate(PROMPT, PARAMS[0]))
        await finish(watched, whole, gate)
        assert (await late).outputs[0].token_ids == whole[0].token_ids
        assert [beat.num_restarts for beat in await beating(stack.url, 2)] == [0, 0]
    events = await asyncio.to_thread(lambda: stack.workers[0].log)
    assert not [line for line in events.splitlines() if "claim_stale" in line or "engine_lease_ended" in line]


async def test_a_timeout_ends_in_its_own_time(clock: MovedClock, start: Start) -> None:
    stack = await start(1)
    async with Client.connect(stack.url) as client:
        await client.pause_generation()
        handle = await client.submit(PROMPT, PARAMS[0], timeout_s=5.0)
        clock.move(-3600)
        async with asyncio.timeout(DEADLINE_S):
            deltas = [delta async for delta in handle.stream()]
        assert [delta.finish_reason for delta in deltas if delta.finished] == ["expired"]


@pytest.mark.parametrize("by_s", STEPS_S)
async def test_a_replica_with_another_clock_takes_over_and_a_host_dies(
    trio: TrioOfClocks, start: Start, gate: Gate
) -> None:
    stack = await start(2, "--deterministic", redis_url=trio.url)
    async with Client.connect(trio.url) as client:
        whole, watched = await start_streams(client, gate, 3)
        old_port = await asyncio.to_thread(trio.kill_primary)
        await asyncio.to_thread(trio.await_failover, old_port)
        await kill_host(stack, 0)
        await finish(watched, whole, gate)
