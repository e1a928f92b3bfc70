"""The standby of an engine: a second worker process with a core, which has loaded the model and waits.

On a CPU:

    keeper of the weights ──fork──▶ core that serves
              └─────────────fork──▶ core on standby

A keeper loads the weights once, and all cores of the engine use its memory (``worker/engine/keeper.py``). The standby
takes no lease, claims nothing and writes nothing to Redis. After a death the supervisor reclaims the requests as
always, and then activates the standby instead of starting a process. So claims, leases and epochs are the same with and
without a standby.

An engine whose weights were replaced, or discarded to sleep, uses memory of its own. Then both processes are ended. A
new keeper loads the new weights, or after a sleep the same again, if that much memory is free. The two copies become
one when the standby takes over.

On a GPU, whose memory does not survive a fork, the standby loads a copy of the weights. It starts if the device has
room for it, and ends when the engine sleeps at any level.

A standby has no KV cache: it allocates it when it takes over, when the memory of the dead process is free.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import psutil
import structlog

from ...shared.errors import PenstockError
from ...shared.process.children import restart_delay_s
from ...shared.values.shown import format_bytes
from ..config.engine_config import EngineConfig
from ..config.worker_config import WorkerConfig
from ..processes.forking import FORK_VERSION, ForkedProcess, ForkKeeper, NotForkedError, fork_process
from ..processes.gpu import free_device_bytes, until_free
from ..processes.host import free_host_bytes
from .engine_process import GROUP_END_TIMEOUT_S, EngineProcess

# The requests of a dead engine resume first.
START_DELAY_S = 0.5
# The fork server may still import torch.
FORK_TIMEOUT_S = 120.0
# The process that serves, the standby, and one that was killed but has not ended.
_BACKLOG = 8
# Of processes that inherit the supervisor's devices.
_FIRST_DEVICE = "0"
# Memory of a GPU that a process takes besides its tensors.
_CONTEXT_BYTES = 1 << 30

log = structlog.get_logger()


class Standby(Protocol):
    """Second process of an engine, which continues after a death."""

    @property
    def waiting_process(self) -> EngineProcess | None:
        """The process on standby, if one runs."""
        ...

    @property
    def deepest_sleep(self) -> int:
        """Level to which the engine may sleep beside it. Deeper sleep frees memory that the standby holds, too."""
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

    async def gone(self) -> None:
        """Wait until the processes that were ended have exited; at most ``GROUP_END_TIMEOUT_S``."""
        ...


class NoStandby:
    """The ``Standby`` of an engine that starts a new process after each death."""

    waiting_process: EngineProcess | None = None
    deepest_sleep: int = 2

    async def prepare_start(self, config: WorkerConfig) -> WorkerConfig:
        return config

    def take_process(self, config: WorkerConfig) -> EngineProcess | None:
        return None

    def keep_ready(self, config: WorkerConfig) -> None:
        pass

    def end_standby(self, reason: str) -> None:
        pass

    async def gone(self) -> None:
        pass


class WaitingProcess:
    """The ``Standby`` of an engine that has a second process.

    Args:
        make_source: returns where processes get the weights of a configuration from; None if there is no such source.
        deepest_sleep: see ``Standby``.
    """

    def __init__(
        self, make_source: Callable[[WorkerConfig], Awaitable[_WeightsSource | None]], deepest_sleep: int
    ) -> None:
        self._make_source = make_source
        self.deepest_sleep = deepest_sleep
        self._source: _WeightsSource | None = None
        self._process: EngineProcess | None = None
        self._taken: EngineProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        # Each ends with a process.
        self._ending: set[asyncio.Task[None]] = set()
        self._weights: _Weights | None = None
        self._source_bytes = 0
        self._numbers = itertools.count(1)

    @property
    def waiting_process(self) -> EngineProcess | None:
        return self._process if self._process is not None and self._process.alive else None

    async def prepare_start(self, config: WorkerConfig) -> WorkerConfig:
        self._stop_standby()
        if config.starts_asleep:
            self.end_standby("the engine sleeps")
            return config
        if self._source is None or not self._source.keeps(config):
            self.end_standby("the keeper of the weights has ended, or has other weights")
            self._source = await self._make_source(config)
        if self._source is None:
            return config
        return msgspec.structs.replace(config, weights_keeper=self._source.address)

    def take_process(self, config: WorkerConfig) -> EngineProcess | None:
        process = self.waiting_process
        if process is None or config.starts_asleep or _Weights.of(process.config) != _Weights.of(config):
            return None
        self._taken = process
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
        if self._source is not None:
            log.info("standby_ended", engine_id=self._source.engine_id, reason=reason)
            self._source_bytes = self._source.num_bytes()
            self._await_end(asyncio.create_task(self._source.end()))
            self._source = None

    async def gone(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=GROUP_END_TIMEOUT_S)

    def _stop_standby(self) -> None:
        self._process = None
        if self._keeping is not None:
            self._keeping.cancel()
            self._await_end(self._keeping)
            self._keeping = None

    def _await_end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _keep_ready(self, config: WorkerConfig) -> None:
        if self._source is None:
            await asyncio.sleep(START_DELAY_S)
            # The engine has a copy of the weights that no other process uses.
            free_bytes = await asyncio.to_thread(free_host_bytes)
            if free_bytes < self._source_bytes:
                reason = f"{format_bytes(free_bytes)} are free, a keeper takes {format_bytes(self._source_bytes)}"
                log.warning("standby_missing", engine_id=config.engine_id, reason=reason)
                return
            self._source = await self._make_source(config)
        if self._source is not None:
            await self._replace_forever(config, self._source)

    async def _replace_forever(self, config: WorkerConfig, source: _WeightsSource) -> None:
        """Run one process on standby after the other, until there is an obstacle."""
        delay_s = START_DELAY_S
        for num_deaths in itertools.count(1):
            await asyncio.sleep(delay_s)
            if obstacle := await source.obstacle(config):
                log.warning("standby_missing", engine_id=config.engine_id, reason=obstacle)
                return
            death = await self._run_standby(
                msgspec.structs.replace(
                    config, weights_keeper=source.address, standby_number=next(self._numbers), starts_asleep=0
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
            self._process = process
            await process.ended.wait()
        except OSError as error:
            return str(error)
        except asyncio.CancelledError:
            # Not before it exists, or it could not be killed.
            await asyncio.wait([starting])
            if process is not self._taken:
                process.kill()
                await process.gone()
            raise
        return process.death().reason


def make_standby(config: WorkerConfig, device_bytes: Callable[[], int]) -> Standby:
    """Return the standby that the options ask for; none without a fork server, whose absence is logged.

    Args:
        device_bytes: as for ``_OwnWeights``.
    """
    if not config.standby or not config.fork_server:
        return NoStandby()
    if config.engine.device == "cpu":
        return WaitingProcess(_fork_keeper, deepest_sleep=1)
    return WaitingProcess(partial(_OwnWeights.create, device_bytes=device_bytes), deepest_sleep=0)


class _Weights(NamedTuple):
    """The properties that processes of an engine must share to continue each other's requests."""

    engine: EngineConfig
    version: str | None

    @classmethod
    def of(cls, config: WorkerConfig) -> _Weights:
        return cls(config.engine, config.weights_version)


class _WeightsSource(Protocol):
    """Source of the weights for the processes of an engine."""

    @property
    def engine_id(self) -> str: ...

    @property
    def address(self) -> str:
        """See ``WorkerConfig.weights_keeper``."""
        ...

    def keeps(self, config: WorkerConfig) -> bool:
        """Return whether it has the weights of ``config``."""
        ...

    async def obstacle(self, config: WorkerConfig) -> str:
        """Return why no process can get the weights of ``config`` beside the one that serves, or ""."""
        ...

    def num_bytes(self) -> int:
        """Return the bytes of the host's memory that it uses, shared or not; 0 if it has ended."""
        ...

    async def end(self) -> None:
        """End it, and wait for its exit. The processes that have weights from it stay."""
        ...


class _OwnWeights:
    """The weights of each process are its own, in the memory of a GPU.

    Args:
        device_bytes: returns the memory of the device that the process which serves has last reported.
    """

    address = ""

    def __init__(self, config: WorkerConfig, device_bytes: Callable[[], int]) -> None:
        self.engine_id = config.engine_id
        self._weights = _Weights.of(config)
        self._device_bytes = device_bytes

    @classmethod
    async def create(cls, config: WorkerConfig, device_bytes: Callable[[], int]) -> _OwnWeights:
        return cls(config, device_bytes)

    def keeps(self, config: WorkerConfig) -> bool:
        return self._weights == _Weights.of(config)

    async def obstacle(self, config: WorkerConfig) -> str:
        device = config.visible_devices or _FIRST_DEVICE
        # It has no KV cache beside the other's.
        needed = max(0, self._device_bytes() - (config.engine.kv_cache_memory or 0)) + _CONTEXT_BYTES
        try:
            # The process that has died may still hold some.
            await until_free(device, needed)
            free_bytes = await asyncio.to_thread(free_device_bytes, device)
        except PenstockError as error:
            return str(error)
        if free_bytes >= needed:
            return ""
        return (
            f"{format_bytes(free_bytes)} of GPU {device} are free, and a second process takes {format_bytes(needed)}: "
            "lower kv_cache_memory, or leave --standby out"
        )

    def num_bytes(self) -> int:
        return 0

    async def end(self) -> None:
        pass


async def _fork_keeper(config: WorkerConfig) -> _Keeper | None:
    """Start the keeper of the weights of ``config``; if that fails, log the reason and return None."""
    try:
        return await _Keeper.fork(config)
    except (NotForkedError, OSError) as error:
        log.warning("standby_missing", engine_id=config.engine_id, reason=str(error))
        return None


class _Keeper:
    """A keeper of weights, forked by the fork server. It ends with ``end``, and with this process."""

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
        return not self._ending.done() and self._weights == _Weights.of(config)

    async def obstacle(self, config: WorkerConfig) -> str:
        return "" if self.keeps(config) else "the keeper of the weights has ended"

    def num_bytes(self) -> int:
        try:
            return psutil.Process(self._process.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        os.close(self._lifeline)
        self._folder.cleanup()
        await self._ending


def _address(folder: tempfile.TemporaryDirectory[str]) -> str:
    return os.path.join(folder.name, "socket")
