"""Agents and the reconciler without a cluster: real workers that die, cannot start, drain, and are held by who dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.fleet.agent import HostAgent
from penstock.worker.fleet.backend import AgentPhase, AgentSpec, AgentStatus
from penstock.worker.fleet.demand import Demand
from penstock.worker.fleet.fleet import Fleet, FleetStartError
from penstock.worker.fleet.member import MemberPhase
from penstock.worker.fleet.scaling import ScalingOptions

from ...gate import Gate
from ...processes import is_gone
from ..supervisor.conftest import DEADLINE_S
from .conftest import processes_of
from .local_backend import LocalBackend

PROMPT, LONG = "count from four to nine:", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    spec: AgentSpec, commands: CommandConnection, namespace: str, backend: LocalBackend, **scaling: float
) -> AsyncIterator[Fleet]:
    """A fleet that runs, and ends in order; what it raises, the block gets."""
    options = msgspec.convert({"least": 1, "most": 1, "grow_after_s": 0.0, **scaling}, ScalingOptions)
    ready = asyncio.Event()
    demand = Demand(commands, Keys(namespace), "demo", 8)
    fleet = Fleet(backend, demand, options, spec, drain_timeout_s=30.0, on_ready=ready.set, tick_s=0.05)
    task = asyncio.create_task(fleet.run())
    waiting = asyncio.create_task(ready.wait())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield fleet
    finally:
        waiting.cancel()
        fleet.stop()
        await task
    assert fleet.members == []


async def state_of(commands: CommandConnection, namespace: str, request_id: str) -> object:
    return await commands.execute("HGET", Keys(namespace).model("demo").request(request_id), "state")


def status_of(agent: HostAgent) -> AgentStatus:
    return msgspec.msgpack.decode(agent.status(), type=AgentStatus)


async def test_a_dead_worker_is_replaced_and_its_request_resumes(
    spec: AgentSpec, commands: CommandConnection, redis_url: str, namespace: str, gate: Gate
) -> None:
    backend = LocalBackend()
    gate.hold_at(5)
    async with (
        running(spec, commands, namespace, backend) as fleet,
        Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client,
    ):
        handle = await client.submit(PROMPT, LONG, model="demo")
        stream = handle.stream()
        assert (await anext(stream)).index == 0
        (member,) = fleet.members
        assert member.status is not None
        os.kill(member.status.pid, signal.SIGKILL)
        await until(lambda: len(backend.places) == 2)
        gate.open()
        async with asyncio.timeout(DEADLINE_S):
            result = await handle.result()
        assert len(result.outputs[0].token_ids) == 40
        await stream.aclose()
        assert [other.worker_name for other in fleet.members] == ["fleet-0"]


async def test_a_failed_start_ends_the_fleet_with_the_workers_error(
    spec: AgentSpec, commands: CommandConnection, namespace: str
) -> None:
    broken = msgspec.structs.replace(spec, options={**spec.options, "PENSTOCK_MODEL": "/no/such/model"})
    with pytest.raises(FleetStartError, match="/no/such/model"):
        async with running(broken, commands, namespace, LocalBackend(), least=2, most=2):
            pytest.fail("it has started")


async def test_an_agent_that_cannot_be_created_ends_the_fleet_immediately(
    spec: AgentSpec, commands: CommandConnection, namespace: str
) -> None:
    with pytest.raises(FleetStartError, match="the package is missing there"):
        async with running(spec, commands, namespace, LocalBackend(refuses="the package is missing there")):
            pytest.fail("it has started")


async def test_the_first_request_wakes_a_fleet_of_nothing(
    spec: AgentSpec, commands: CommandConnection, redis_url: str, namespace: str
) -> None:
    backend = LocalBackend(most=1)
    async with running(spec, commands, namespace, backend, least=0, most=3, shrink_after_s=0.2) as fleet:
        assert backend.places == []
        async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
            handle = await client.submit(PROMPT, LONG, model="demo")
            async with asyncio.timeout(DEADLINE_S):
                assert len((await handle.result()).outputs[0].token_ids) == 40
        await until(lambda: not fleet.members)
        assert fleet.target == 0


async def test_a_second_drain_without_timeout_requeues_the_running_request(
    spec: AgentSpec, commands: CommandConnection, redis_url: str, namespace: str, gate: Gate
) -> None:
    gate.hold_at(5)
    agent = await asyncio.to_thread(HostAgent, msgspec.msgpack.encode(spec))
    await until(lambda: status_of(agent).phase is AgentPhase.SERVING)
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        handle = await client.submit(PROMPT, LONG, model="demo")
        stream = handle.stream()
        await anext(stream)
        patient = asyncio.create_task(asyncio.to_thread(agent.drain, 600.0))
        await until(lambda: status_of(agent).phase is AgentPhase.LEAVING)
        ended = msgspec.msgpack.decode(await asyncio.to_thread(agent.drain, 0.0), type=AgentStatus)
        assert (ended.phase, ended.exit_status) == (AgentPhase.ENDED, 0)
        assert (await patient) == agent.status()
        assert await state_of(commands, namespace, handle.request_id) == b"queued"
        await stream.aclose()


async def test_the_worker_ends_when_the_host_of_its_agent_dies(
    spec: AgentSpec, commands: CommandConnection, redis_url: str, namespace: str, gate: Gate
) -> None:
    """Its requests return to the queue without any call to the agent."""
    gate.hold_at(5)
    code = (
        "import sys, time, penstock.worker.fleet.agent as a; agent = a.HostAgent(sys.stdin.buffer.read());"
        "time.sleep(3600)"
    )
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=subprocess.PIPE)
    assert holder.stdin is not None
    holder.stdin.write(msgspec.msgpack.encode(spec))
    holder.stdin.close()
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        handle = await client.submit(PROMPT, LONG, model="demo")
        stream = handle.stream()
        async with asyncio.timeout(DEADLINE_S):
            await anext(stream)
        processes = processes_of(namespace)
        assert processes
        holder.kill()
        await holder.wait()
        await until(lambda: all(is_gone(process) for process in processes))
        assert await state_of(commands, namespace, handle.request_id) == b"queued"
        await stream.aclose()


async def test_signals_hurry_a_fleet_that_leaves(
    spec: AgentSpec, commands: CommandConnection, redis_url: str, namespace: str, gate: Gate
) -> None:
    gate.hold_at(5)
    async with (
        running(spec, commands, namespace, LocalBackend()) as fleet,
        Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client,
    ):
        handle = await client.submit(PROMPT, LONG, model="demo")
        stream = handle.stream()
        await anext(stream)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: fleet.members[0].phase is MemberPhase.LEAVING)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: not fleet.members)
        assert await state_of(commands, namespace, handle.request_id) == b"queued"
        await stream.aclose()
