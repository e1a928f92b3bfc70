"""The standby of an engine: a second worker process with a core, which has loaded the model and waits.

    keeper of the weights ──fork──▶ core that serves
              └─────────────fork──▶ core on standby

A keeper loads the weights once, and all cores of the engine use its memory (``worker/engine/keeper.py``). The standby
takes no lease, claims nothing and writes nothing to Redis. After a death the supervisor reclaims the requests as
always, and then activates the standby instead of starting a process. So claims, leases and epochs are the same with and
without a standby.

An engine whose weights were replaced, or discarded to sleep, uses memory of its own. Then both processes are ended. A
new keeper loads the new weights, or after a sleep the same again, if that much memory is free. The two copies become
one when the standby takes over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
import psutil
import structlog

from ...shared.process.children import restart_delay_s
from ...shared.values.shown import format_bytes
from ..config.engine_config import EngineConfig
from ..config.worker_config import WorkerConfig
from ..processes.forking import FORK_VERSION, ForkedProcess, ForkKeeper, NotForkedError, fork_process
from ..processes.host import free_host_bytes
from .engine_process import EngineProcess

# The requests of a dead engine resume first.
START_DELAY_S = 0.5
# The fork server may still import torch.
FORK_TIMEOUT_S = 120.0
# The process that serves, the standby, and one that was killed but has not ended.
_BACKLOG = 8

log = structlog.get_logger()


class Standby(Protocol):
    """Second process of an engine, which continues after a death."""

    @property
    def waiting_process(self) -> EngineProcess | None:
        """The process on standby, if one runs."""
        ...

    async def prepare_start(self, config: WorkerConfig) -> WorkerConfig:
        """Return the configuration for a new process, which uses the weights of the keeper if there is one."""
        ...

    def take_process(self, config: WorkerConfig) -> EngineProcess | None:
        """Return the process on standby, which the caller activates; None without one that suits ``config``."""
        ...

    def keep_ready(self, config: WorkerConfig) -> None:
        """Keep a process on standby with the weights of ``config`` from now on.

        Later calls with these weights do nothing. Other weights end the standby and the keeper of the former ones.
        """
        ...

    def end_standby(self, reason: str) -> None:
        """End the standby and the keeper, if they run."""
        ...


class NoStandby:
    """The ``Standby`` of an engine that starts a new process after each death."""

    waiting_process: EngineProcess | None = None

    async def prepare_start(self, config: WorkerConfig) -> WorkerConfig:
        return config

    def take_process(self, config: WorkerConfig) -> EngineProcess | None:
        return None

    def keep_ready(self, config: WorkerConfig) -> None:
        pass

    def end_standby(self, reason: str) -> None:
        pass


class SharedWeightsStandby:
    """The ``Standby`` of an engine whose cores share the weights of a keeper."""

    def __init__(self) -> None:
        self._keeper: _Keeper | None = None
        self._process: EngineProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._weights: _Weights | None = None
        self._keeper_bytes = 0
        self._numbers = itertools.count(1)

    @property
    def waiting_process(self) -> EngineProcess | None:
        return self._process if self._process is not None and self._process.alive else None

    async def prepare_start(self, config: WorkerConfig) -> WorkerConfig:
        self._stop_standby()
        if config.starts_asleep:
            self.end_standby("the engine sleeps")
            return config
        if self._keeper is None or not self._keeper.keeps(config):
            self.end_standby("the keeper of the weights has ended, or has other weights")
            self._keeper = await _fork_keeper(config)
        if self._keeper is None:
            return config
        return msgspec.structs.replace(config, weights_keeper=self._keeper.address)

    def take_process(self, config: WorkerConfig) -> EngineProcess | None:
        process = self.waiting_process
        if process is None or config.starts_asleep or _Weights.of(process.config) != _Weights.of(config):
            return None
        self._process = None
        self._stop_standby()
        return process

    def keep_ready(self, config: WorkerConfig) -> None:
        if self._keeping is not None and self._weights == _Weights.of(config):
            return
        if self._keeping is not None:
            self.end_standby("the engine has replaced the weights")
        self._weights = _Weights.of(config)
        self._keeping = asyncio.create_task(self._keep_ready(config))

    def end_standby(self, reason: str) -> None:
        self._stop_standby()
        if self._keeper is not None:
            log.info("standby_ended", engine_id=self._keeper.engine_id, reason=reason)
            self._keeper_bytes = self._keeper.num_bytes()
            self._keeper.kill_keeper()
            self._keeper = None

    def _stop_standby(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def _keep_ready(self, config: WorkerConfig) -> None:
        if self._keeper is None:
            await asyncio.sleep(START_DELAY_S)
            # The engine has a copy of the weights that no other process uses.
            free_bytes = await asyncio.to_thread(free_host_bytes)
            if free_bytes < self._keeper_bytes:
                reason = f"{format_bytes(free_bytes)} are free, a keeper takes {format_bytes(self._keeper_bytes)}"
                log.warning("standby_missing", engine_id=config.engine_id, reason=reason)
                return
            self._keeper = await _fork_keeper(config)
        if self._keeper is not None:
            await self._replace_forever(config, self._keeper)

    async def _replace_forever(self, config: WorkerConfig, keeper: _Keeper) -> None:
        """Run one process on standby after the other, until the keeper ends."""
        delay_s = START_DELAY_S
        for num_deaths in itertools.count(1):
            await asyncio.sleep(delay_s)
            if not keeper.keeps(config):
                log.warning("standby_missing", engine_id=config.engine_id, reason="the keeper of the weights has ended")
                return
            death = await self._run_standby(
                msgspec.structs.replace(
                    config, weights_keeper=keeper.address, standby_number=next(self._numbers), starts_asleep=0
                )
            )
            log.warning("standby_lost", engine_id=config.engine_id, cause=death)
            delay_s = START_DELAY_S + restart_delay_s(num_deaths)

    async def _run_standby(self, config: WorkerConfig) -> str:
        """Run a process on standby to its end, and return the cause."""
        process = EngineProcess(config, lambda _: None)
        starting = asyncio.create_task(process.start())
        try:
            await asyncio.shield(starting)
        except OSError as error:
            return str(error)
        except asyncio.CancelledError:
            # Not before it exists, or it could not be killed.
            await asyncio.wait([starting])
            process.kill()
            raise
        self._process = process
        await process.ended.wait()
        return process.death().reason


def make_standby(config: WorkerConfig) -> Standby:
    """Return the standby that the options ask for; none without a fork server, whose absence is logged."""
    return SharedWeightsStandby() if config.standby and config.fork_server else NoStandby()


class _Weights(NamedTuple):
    """The properties that processes of an engine must share to continue each other's requests."""

    engine: EngineConfig
    version: str | None

    @classmethod
    def of(cls, config: WorkerConfig) -> _Weights:
        return cls(config.engine, config.weights_version)


async def _fork_keeper(config: WorkerConfig) -> _Keeper | None:
    """Start the keeper of the weights of ``config``; if that fails, log the reason and return None."""
    try:
        return await _Keeper.fork(config)
    except (NotForkedError, OSError) as error:
        log.warning("standby_missing", engine_id=config.engine_id, reason=str(error))
        return None


class _Keeper:
    """A keeper of weights, forked by the fork server. It ends with ``kill_keeper``, and with this process."""

    def __init__(
        self, config: WorkerConfig, folder: tempfile.TemporaryDirectory[str], lifeline: int, process: ForkedProcess
    ) -> None:
        self.engine_id = config.engine_id
        self.address = _address(folder)
        self._weights = _Weights.of(config)
        self._folder = folder
        self._lifeline = lifeline
        self._process = process
        self._ending = asyncio.create_task(process.wait())

    @classmethod
    async def fork(cls, config: WorkerConfig) -> _Keeper:
        """Start the keeper of the weights of ``config``. It answers once it has loaded them.

        Raises:
            NotForkedError: the fork server is unreachable, or refuses.
        """
        folder = tempfile.TemporaryDirectory(prefix="penstock-weights-")
        request = ForkKeeper(
            version=FORK_VERSION,
            engine_id=f"{config.engine_id}~weights",
            environment=dict(os.environb),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=["--log-level", config.log_level, "--log-format", config.log_format],
            engine_config=config.engine.encode(),
        )
        theirs, ours = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                # The folder is closed to other users.
                listener.bind(_address(folder))
                listener.listen(_BACKLOG)
                descriptors = [theirs, 2, 2, listener.fileno()]
                process = await fork_process(config.fork_server, request, descriptors, FORK_TIMEOUT_S)
        except BaseException:
            os.close(ours)
            folder.cleanup()
            raise
        finally:
            os.close(theirs)
        return cls(config, folder, ours, process)

    def keeps(self, config: WorkerConfig) -> bool:
        """Return whether it runs and has the weights of ``config``."""
        return not self._ending.done() and self._weights == _Weights.of(config)

    def num_bytes(self) -> int:
        """Return the bytes of memory that it uses, shared or not; 0 if it has ended."""
        try:
            return psutil.Process(self._process.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    def kill_keeper(self) -> None:
        """Kill it. The cores that it has forked stay."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        os.close(self._lifeline)
        self._folder.cleanup()


def _address(folder: tempfile.TemporaryDirectory[str]) -> str:
    return os.path.join(folder.name, "socket")
