"""A standby takes over from any process that dies: no token is lost or repeated, and the weights are loaded once."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.messages.supervision import EngineState

from ..gate import Gate
from ..integration.engine.adapters.peft_folders import R4, load_base, write_adapter
from ..processes import DEADLINE_S, is_alive, is_gone
from .conftest import Start
from .watching import (
    LONG,
    PARAMS,
    PROMPT,
    Watched,
    all_under_way,
    engines,
    finish,
    log_of,
    start_streams,
    until,
    until_logged,
)

OPTIONS = ("--deterministic", "--standby", "--log-format", "json", "--max-deliveries", "9")


async def events(stack: LocalStack, name: str) -> list[dict[str, Any]]:
    """Return the events of a name that the workers have logged so far."""
    lines = (await log_of(stack)).splitlines()
    return [event for line in lines if f'"{name}"' in line and (event := json.loads(line))["event"] == name]


async def standby(stack: LocalStack, number: int) -> dict[str, Any]:
    """Wait for the standby with a number, and return the ids of its processes."""
    await until_logged(stack, '"event": "standby_ready"', number)
    return (await events(stack, "standby_ready"))[number - 1]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def until_state(stack: LocalStack, num_restarts: int, *states: EngineState) -> EngineHeartbeat:
    """Wait for the only engine's heartbeat after this many restarts, in one of these states."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for beat in await engines(stack.url):
                if beat.num_restarts == num_restarts and beat.state in states and is_alive(beat.worker_pid):
                    return beat
            await asyncio.sleep(0.02)


async def until_serving(stack: LocalStack, num_restarts: int) -> EngineHeartbeat:
    return await until_state(stack, num_restarts, EngineState.READY, EngineState.BUSY)


async def take_over(stack: LocalStack, num_restarts: int, waiting: dict[str, Any]) -> None:
    """Kill the core that serves after this many restarts, and wait until ``waiting`` serves."""
    kill((await until_serving(stack, num_restarts)).core_pid)
    assert (await until_serving(stack, num_restarts + 1)).core_pid == waiting["core_pid"]


def write_other_weights(folder: Path) -> None:
    """Copy the demo model into ``folder``, with other weights."""
    shutil.copytree(MODEL, folder)
    weights = load_file(MODEL / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})


async def test_generations_resume_at_the_standby(start: Start, gate: Gate, tmp_path: Path) -> None:
    cats = write_adapter(tmp_path / "cats", load_base(MODEL), R4, seed=0, size=0.4)
    stack = await start(1, *OPTIONS, "--enable-lora")
    async with Client.connect(stack.url) as client:
        await client.register_lora("cats", cats)
        outputs = [await client.generate(PROMPT, params, model="cats") for params in PARAMS]
        whole, watched = await start_streams(client, gate)
        whole += [output.outputs[0] for output in outputs]
        watched += [Watched(client.stream(PROMPT, params, model="cats")) for params in PARAMS]
        await all_under_way(watched)
        serving, waiting = await until_serving(stack, 0), await standby(stack, 1)
        keeper = psutil.Process(waiting["core_pid"]).ppid()
        assert psutil.Process(serving.core_pid).ppid() == keeper

        # The standby takes over, also before the parent of the worker process has reported its end.
        fork_server = psutil.Process(serving.worker_pid).parent()
        assert fork_server is not None
        fork_server.suspend()
        try:
            kill(serving.core_pid)
            serving = await until_serving(stack, 1)
        finally:
            fork_server.resume()
        assert (serving.worker_pid, serving.core_pid) == (waiting["worker_pid"], waiting["core_pid"])
        # A standby that dies is replaced, and no request is disturbed.
        kill((await standby(stack, 2))["core_pid"])
        await until_logged(stack, '"event": "standby_lost"')
        waiting = await standby(stack, 3)
        assert len(await events(stack, "weights_kept")) == 1

        # Without a keeper the standby still takes over. The next start has another keeper.
        kill(keeper, serving.worker_pid)
        serving = await until_serving(stack, 2)
        assert serving.core_pid == waiting["core_pid"]
        await until_logged(stack, '"event": "standby_missing"')
        kill(serving.core_pid)
        serving, waiting = await until_serving(stack, 3), await standby(stack, 4)
        assert len(await events(stack, "weights_kept")) == 2

        # Both at the same time. The supervisor may still activate the one that is dead.
        kill(waiting["worker_pid"], serving.worker_pid)
        await finish(watched, whole, gate)
    for one in watched:
        assert [delta.stats.num_deliveries for delta in one.deltas if delta.stats is not None][-1] == 5


async def test_a_standby_follows_when_the_weights_change(start: Start, gate: Gate, tmp_path: Path) -> None:
    """An engine that sleeps frees the memory, and no process serves weights that were replaced."""
    other = tmp_path / "other"
    write_other_weights(other)
    stack = await start(1, *OPTIONS)
    async with Client.connect(stack.url) as client:
        waiting = await standby(stack, 1)
        family = [psutil.Process(waiting["core_pid"]), psutil.Process(waiting["worker_pid"])]
        family.append(psutil.Process(family[0].ppid()))
        # Its weights leave memory, and so do those of the standby and the keeper.
        await client.sleep(2)
        await until(lambda: all(map(is_gone, family)), DEADLINE_S, "a process of the standby stayed")
        # The engine dies asleep, and sleeps on.
        (beat,) = await engines(stack.url)
        kill(beat.core_pid)
        await until_state(stack, 1, EngineState.SLEEPING)
        await client.wake_up()
        # Awake it has a keeper again.
        waiting = await standby(stack, 2)
        whole, watched = await start_streams(client, gate)
        await take_over(stack, 1, waiting)
        waiting = await standby(stack, 3)
        await finish(watched, whole, gate)

        # An engine that dies while it loads other weights continues with the former ones.
        gate.hold_at(LONG - 1)
        watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        await all_under_way(watched)
        serving = await until_serving(stack, 2)
        os.kill(serving.core_pid, signal.SIGSTOP)
        loading = asyncio.create_task(client.reload_weights(str(other), mode="keep"))
        await until_logged(stack, "ReloadWeights")
        kill(serving.core_pid)
        await asyncio.gather(loading, return_exceptions=True)
        assert (await until_serving(stack, 3)).core_pid == waiting["core_pid"]
        await finish(watched, whole, gate)

        # The standby of an engine that has loaded them has them, too.
        former = psutil.Process((await standby(stack, 4))["core_pid"])
        await client.reload_weights(str(other))
        await until_logged(stack, '"event": "standby_ended"', 2)
        waiting = await standby(stack, 5)
        assert is_gone(former)
        whole, watched = await start_streams(client, gate)
        await take_over(stack, 3, waiting)
        await standby(stack, 6)
        await finish(watched, whole, gate)

        # Its keeper has ended, and it hangs: it still ends with its worker process.
        await client.sleep(2)
        await client.wake_up()
        waiting = await standby(stack, 7)
        whole, watched = await start_streams(client, gate)
        serving = await until_serving(stack, 4)
        core = psutil.Process(serving.core_pid)
        core.suspend()
        kill(serving.worker_pid)
        await until(lambda: is_gone(core), what="the core outlived its worker process")
        assert (await until_serving(stack, 5)).core_pid == waiting["core_pid"]
        await finish(watched, whole, gate)
