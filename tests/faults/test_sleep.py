"""Processes killed while their engine goes to sleep, sleeps or wakes up: it sleeps on, and no request is disturbed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, EngineCallError
from penstock.shared.control.engine import Sleep, SleepState, WakeUp
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.errors import EngineDeadError
from penstock.shared.messages.supervision import EngineState
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor.engine_process import EngineProcess
from penstock.worker.supervisor.fork_server import FORK_SERVER_VARIABLE

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import (
    PARAMS,
    PROMPT,
    Watched,
    beating,
    engines,
    finish,
    log_of,
    start_streams,
    undisturbed,
    until,
    until_logged,
)


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Overrides the project's: a supervisor writes to its processes' pipes in its loop, as one here does."""


async def until_beat(stack: LocalStack, condition: Callable[[EngineHeartbeat], bool]) -> EngineHeartbeat:
    """Wait for a heartbeat of the only engine that meets ``condition``."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for beat in await engines(stack.url):
                if condition(beat):
                    return beat
            await asyncio.sleep(0.05)


async def kill(stack: LocalStack, role: str, level: int) -> None:
    """Kill a process with SIGKILL, and wait until the engine sleeps at ``level`` again, without a core."""
    (beat,) = await beating(stack.url, 1)
    os.kill(getattr(beat, f"{role}_pid"), signal.SIGKILL)
    await until_asleep(stack, level, beat.num_restarts + 1)


async def until_asleep(stack: LocalStack, level: int, num_restarts: int) -> None:
    beat = await until_beat(stack, lambda beat: beat.num_restarts == num_restarts and beat.state != EngineState.DEAD)
    assert (beat.state, beat.sleep_level, beat.core_pid) == (EngineState.SLEEPING, level, 0)
    assert beat.state_words == f"sleeping {level}, unloaded"


async def stopped(stack: LocalStack) -> EngineHeartbeat:
    """Stop the core, so that it carries nothing out until it is killed."""
    (beat,) = await beating(stack.url, 1)
    os.kill(beat.core_pid, signal.SIGSTOP)
    return beat


async def ended(call: Awaitable[object]) -> None:
    """Wait for a call that may have reached the engine's next process, or failed with the former one."""
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("role", ["core", "worker"])
async def test_an_engine_that_dies_while_it_sleeps_sleeps_on(start: Start, gate: Gate, role: str) -> None:
    stack = await start(1, "--deterministic", "--stall-timeout", "300")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)

        # Going to sleep: the core has the call, and does nothing any more.
        beat = await stopped(stack)
        going = asyncio.create_task(client.sleep(2))
        await until_beat(stack, lambda beat: beat.sleep_level == 2)
        os.kill(getattr(beat, f"{role}_pid"), signal.SIGKILL)
        await until_asleep(stack, 2, 1)
        await ended(going)
        (state,) = (await client.sleep_state()).values()
        assert (state.level, state.is_unloaded) == (2, True)
        await client.check_health()
        watched += [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        assert not any(one.task.done() for one in watched)

        # Asleep, with a core and without one.
        await client.wake_up()
        await client.sleep(1)
        await kill(stack, role, 1)
        with pytest.raises(EngineCallError, match="its model is not loaded; wake it up first"):
            await client.execute_dummy_batch()
        await client.sleep(2)
        beat = await until_beat(stack, lambda beat: beat.sleep_level == 2)
        os.kill(beat.worker_pid, signal.SIGKILL)
        await until_asleep(stack, 2, 3)

        # Waking up.
        await client.wake_up()
        await client.sleep(2)
        beat = await stopped(stack)
        num_calls = (await log_of(stack)).count("WakeUp")
        waking = asyncio.create_task(client.wake_up())
        await until_logged(stack, "WakeUp", num_calls + 1)
        os.kill(getattr(beat, f"{role}_pid"), signal.SIGKILL)
        await ended(waking)
        await until_beat(stack, lambda beat: beat.num_restarts == 4 and beat.state is not EngineState.DEAD)
        assert not any(one.task.done() for one in watched)
        await client.wake_up()
        await finish(watched, whole * 2, gate)
        (beat,) = await beating(stack.url, 1)
        assert (beat.num_restarts, beat.sleep_level) == (4, 0)


async def test_an_engine_whose_model_is_gone_sleeps_on_and_says_so(start: Start, gate: Gate, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    stack = await start(1, "--deterministic", model=folder)
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client)
        await client.sleep(2)
        await kill(stack, "core", 2)
        folder.rename(tmp_path / "aside")
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        with pytest.raises(EngineCallError, match="does not exist"):
            await client.wake_up()
        await until_asleep(stack, 2, 2)
        (tmp_path / "aside").rename(folder)
        await client.wake_up()
        await finish(watched, whole, gate)


async def test_a_supervisor_has_its_engine_sleep_and_wake_while_redis_is_away(start: Start) -> None:
    """Send orders through standard input. They take their turns among the calls of operators."""
    stack = await start(0)
    engine = EngineConfig(model=str(MODEL), served_model_name="demo", device="cpu", num_threads=1)
    fork_server = os.environ.get(FORK_SERVER_VARIABLE, "")
    config = WorkerConfig(
        worker_id="h", engine_id="h-0", redis_url=stack.url, engine=engine, fork_server=fork_server, starts_asleep=2
    )
    process = EngineProcess(config, lambda _: None)
    await process.start()
    try:
        async with Client.connect(stack.url, model="demo") as client:
            await until(lambda: process.state is EngineState.SLEEPING)
            assert await process.order(WakeUp()) == SleepState()
            expected = (await client.generate(PROMPT, PARAMS[0])).outputs[0]
            calls = [client.sleep(1), process.order(WakeUp()), client.sleep(2), process.order(Sleep(level=2))]
            await asyncio.gather(*calls)
            assert (await process.order(Sleep(level=2))).level == process.sleep_level == 2
            await asyncio.to_thread(stack.kill_redis)
            assert await process.order(WakeUp()) == SleepState()
            assert process.sleep_level == 0
            await asyncio.to_thread(stack.restart_redis)
            watched = Watched(client.stream(PROMPT, PARAMS[0]))
            async with asyncio.timeout(DEADLINE_S):
                await watched.task
            watched.check(expected)
            process.kill()
            with pytest.raises(EngineDeadError):
                await process.order(Sleep())
    finally:
        process.kill()
        await process.ended.wait()
