"""How long a subscriber waits for its next token after kill -9 of the engine core that ran its request.

Also how much memory a standby takes that no other process uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import msgspec
import psutil

from .....producer import Client, SamplingParams
from .....shared.broker import Broker
from .....shared.connection import CommandConnection
from .....shared.deployment.presence import read_heartbeats
from .....shared.deployment.records import EngineHeartbeat
from .....shared.keys import Keys
from .....shared.messages.supervision import EngineState
from ....demo.run import MODEL
from ....local.stack import LocalStack
from ...chaos.recovery_clock import RecoveryClock

NUM_STREAMS = 16
NUM_KILLS = 6
_STANDBY_READY = "standby_ready"
POLL_S = 0.05
TIMEOUT_S = 120.0
# As long as the outputs of the throughput rows. Generated tokens must be computed again.
PARAMS = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True)
PROMPT = "count from four to nine:"
STANDBY_OPTIONS = ["--standby", "--log-level", "info", "--log-format", "json"]


class Recovery(msgspec.Struct, kw_only=True):
    """Seconds from the kill to the next token, of each request that the killed engine held.

    Args:
        has_standby: whether each engine had a standby.
    """

    num_engines: int
    ready_time_s: float
    seconds: list[float]
    has_standby: bool = False


class StandbyMemory(msgspec.Struct, kw_only=True):
    """Memory of a standby, in bytes.

    Args:
        weights_bytes: of the model's files.
        standby_bytes: memory of its worker process and core that no other process uses.
        keeper_bytes: the same of the keeper of the weights.
    """

    weights_bytes: int
    standby_bytes: int
    keeper_bytes: int


def measure_recovery(num_engines: int, *, has_standby: bool = False) -> Recovery:
    """Kill a busy core ``NUM_KILLS`` times among ``num_engines`` that serve the demo model."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--log-level", "error"]
    # Each has room for everything, so nothing waits for the restart of the killed one.
    options += ["--max-num-seqs", str(NUM_STREAMS)]
    if has_standby:
        options += STANDBY_OPTIONS
    with LocalStack(MODEL, options, num_workers=num_engines) as stack:
        seconds = asyncio.run(kill_repeatedly(stack, num_engines, has_standby=has_standby))
        return Recovery(
            num_engines=num_engines, ready_time_s=stack.ready_time_s, seconds=seconds, has_standby=has_standby
        )


def measure_standby_memory(model: Path) -> StandbyMemory:
    """Serve the model in a folder, and measure the standby of its engine."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--max-model-len", "512", *STANDBY_OPTIONS]
    with LocalStack(model, options) as stack:
        worker_pid, core_pid = asyncio.run(standby_pids(stack, 1))
        keeper = psutil.Process(core_pid).parent()
        assert keeper is not None, "the core on standby has no keeper"
        return StandbyMemory(
            weights_bytes=sum(path.stat().st_size for path in model.glob("*.safetensors")),
            standby_bytes=own_bytes(worker_pid) + own_bytes(core_pid),
            keeper_bytes=own_bytes(keeper.pid),
        )


async def standby_pids(stack: LocalStack, number: int) -> tuple[int, int]:
    """Wait until the standby with a number is ready; return the ids of its worker process and core."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        lines = [line for line in stack.workers[0].log.splitlines() if _STANDBY_READY in line]
        if len(lines) >= number:
            line = json.loads(lines[number - 1])
            return line["worker_pid"], line["core_pid"]
        if time.monotonic() > give_up_at:
            raise TimeoutError("no standby is ready")
        await asyncio.sleep(POLL_S)


def own_bytes(pid: int) -> int:
    """Return the bytes that a process has written and shares with no other; pages of files are not included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


async def kill_repeatedly(
    stack: LocalStack, num_engines: int, *, has_standby: bool, num_kills: int = NUM_KILLS
) -> list[float]:
    """Kill a busy core ``num_kills`` times; return the seconds until the next token of each request that it ran."""
    clock = RecoveryClock()
    commands = CommandConnection(stack.url)
    broker = Broker(commands, Keys().model("demo"))
    async with Client.connect(stack.url) as client:
        streams = [asyncio.create_task(_stream_for_ever(client, clock, f"r{i}")) for i in range(NUM_STREAMS)]
        for number in range(1, num_kills + 1):
            if has_standby:
                await standby_pids(stack, number)
            beats = await _all_serving(commands, num_engines)
            victim = max(beats, key=lambda beat: beat.num_running_reqs)
            claimed = [request_id for request_id, _ in await broker.claims(victim.engine_id)]
            os.kill(victim.core_pid, signal.SIGKILL)
            clock.died(claimed)
            await _until_empty(clock)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await commands.close()
    return clock.recoveries_s


async def _stream_for_ever(client: Client, clock: RecoveryClock, name: str) -> None:
    number = 0
    while True:
        request_id = f"{name}-{number}"
        async for _ in client.stream(PROMPT, PARAMS, request_id=request_id):
            clock.saw(request_id)
        clock.ended(request_id)
        number += 1


async def _all_serving(commands: CommandConnection, num_engines: int) -> list[EngineHeartbeat]:
    """Wait until all engines serve and a request runs, and return their heartbeats."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while True:
        beats = await read_heartbeats(commands.execute, Keys())
        serving = [beat for beat in beats if beat.state in (EngineState.READY, EngineState.BUSY)]
        if len(serving) == num_engines and any(beat.num_running_reqs for beat in serving):
            return serving
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"only {len(serving)} of {num_engines} engines serve")
        await asyncio.sleep(POLL_S)


async def _until_empty(clock: RecoveryClock) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while clock.num_waiting:  # noqa: ASYNC110  # streams say so one by one
            await asyncio.sleep(POLL_S)
