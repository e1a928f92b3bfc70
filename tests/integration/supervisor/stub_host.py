"""A real supervisor inside the test, over real processes that serve nothing: quick to start, and to be told to fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import DrainCommand, EngineState, ScaleCommand, WorkerCommand
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor import (
    Supervisor,
    engine_process,
    supervised_engine,
)
from penstock.worker.supervisor.host_metrics import MetricsServer
from penstock.worker.supervisor.restart import Phase

from ...processes import is_gone

STUB_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))
MODEL = "demo"


async def eventually(condition: Callable[[], object | Awaitable[object]], timeout_s: float = 120.0) -> None:
    """Wait until ``condition``, which may be a coroutine function, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


class StubHost:
    """A supervisor of stub workers; its engines are h-0, h-1, ..."""

    def __init__(
        self,
        commands: CommandConnection,
        folder: Path,
        num_engines: int,
        config: dict[str, Any],
        metrics: MetricsServer | None = None,
        max_engines: int = 0,
    ) -> None:
        self._commands = commands
        self._folder = folder
        self._keys = Keys(config["namespace"])
        self.broker = Broker(commands, self._keys.model(MODEL))
        engine = config.pop("engine", EngineConfig(model=MODEL))

        def make_config(index: int) -> WorkerConfig:
            return WorkerConfig(
                worker_id="h", engine_id=f"h-{index}", engine_name=f"name-{index}", engine=engine, **config
            )

        configs = [make_config(index) for index in range(num_engines)]
        self._ready = asyncio.Event()
        self.supervisor = Supervisor(configs, self._ready.set, metrics, None, make_config, max_engines)
        self.engines = self.supervisor._engines
        self._seen: set[psutil.Process] = set()
        self.running = asyncio.create_task(self.supervisor.run())

    async def until_ready(self) -> None:
        await eventually(lambda: self._ready.is_set() or self.running.done())
        if self.running.done():
            await self.running

    def tell(self, index: int, behaviour: str) -> None:
        """Set the behaviour of an engine's next lives."""
        (self._folder / f"h-{index}").write_text(behaviour)

    def process(self, index: int) -> psutil.Process:
        """The worker process of an engine's present life."""
        popen = self.engines[index].process._process
        assert popen is not None
        process = psutil.Process(popen.pid)
        self._seen.add(process)
        return process

    async def until_restarted(self, index: int, num_restarts: int = 1) -> None:
        policy = self.engines[index].policy
        await eventually(lambda: policy.phase is Phase.SERVING and policy.num_restarts >= num_restarts)
        assert policy.num_restarts == num_restarts

    async def claim(self, index: int, request_id: str = "r") -> None:
        """Enqueue a request and claim it in the name of an engine."""
        await self.broker.enqueue(request_id, b"payload", result_ttl_ms=60_000)
        (claimed,) = (await self.broker.claim(f"h-{index}", EngineCapacity(max_num_seqs=1))).claims
        assert claimed.request_id == request_id

    async def heartbeat(self, index: int) -> EngineHeartbeat | None:
        """Return what is listed for an engine; a stub worker has no heartbeat of its own."""
        beat = await self._commands.execute("GET", self._keys.engine(f"h-{index}"))
        return None if beat is None else msgspec.json.decode(beat, type=EngineHeartbeat)

    async def until_listed_dead(self, index: int) -> EngineHeartbeat:
        async def is_listed() -> bool:
            beat = await self.heartbeat(index)
            return beat is not None and beat.state is EngineState.DEAD

        await eventually(is_listed)
        beat = await self.heartbeat(index)
        assert beat is not None
        return beat

    async def drain(self) -> None:
        await self._command(DrainCommand())

    async def scale(self, num_engines: int) -> None:
        await self._command(ScaleCommand(num_engines))

    async def _command(self, command: WorkerCommand) -> None:
        data = msgspec.msgpack.encode(command)
        assert await self._commands.execute("PUBLISH", self._keys.worker_commands("h"), data) == 1

    async def result(self, timeout_s: float = 120.0) -> bool:
        """Return what ``Supervisor.run`` returns, and check that nothing is left of it."""
        result = await asyncio.wait_for(asyncio.shield(self.running), timeout_s)
        assert all(is_gone(process) for process in self._seen)
        assert not any(map(_is_stub, psutil.Process().children()))
        assert await self._commands.execute("SCARD", self._keys.engines()) == 0
        return result

    async def destroy(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        # What was killed at last ends before the loop does.
        ending = [task for engine in self.engines for task in engine.process._tasks]
        await asyncio.gather(*ending, return_exceptions=True)


def _is_stub(process: psutil.Process) -> bool:
    try:
        return not is_gone(process) and STUB_COMMAND[1] in process.cmdline()
    except psutil.NoSuchProcess:
        return False


StartHost = Callable[..., Awaitable[StubHost]]


def wait_for_redis(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long a supervisor that ends waits for Redis to take what it leaves behind."""
    monkeypatch.setattr(supervised_engine, "REMOVE_TIMEOUT_S", seconds)
    monkeypatch.setattr(supervised_engine, "LAST_RECLAIM_TIMEOUT_S", seconds)


def use_stub_workers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make supervisors of this process start stubs, and wait at their end for a Redis that is only slow."""
    monkeypatch.setattr(engine_process, "COMMAND", STUB_COMMAND)
    wait_for_redis(monkeypatch, 30.0)
    monkeypatch.setenv("STUB_FOLDER", str(folder))
