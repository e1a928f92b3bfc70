"""Start the process of an engine core: forked by the fork server if one runs, otherwise as a new process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog

from ....shared.errors import EngineDeadError
from ....shared.process.children import start_child
from ...processes.forking import FORK_VERSION, ForkCore, NotForkedError, fork_process

# The first core of a host waits until the fork server has imported its modules, which takes as long as in the core.
FORK_TIMEOUT_S = 120.0

log = structlog.get_logger(__name__)


class ForkServer(NamedTuple):
    """The socket of a process that forks cores, and the time that it has to answer: it may still import or load."""

    address: str
    timeout_s: float | None = FORK_TIMEOUT_S


class CoreProcess(Protocol):
    """A running core, a child of this process or of the fork server."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Wait for its exit and return the exit status as ``Popen.returncode``."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal.

        Raises:
            ProcessLookupError: it has exited.
        """
        ...


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the start of a core.

    Args:
        engine_id: id of the worker process that the core belongs to.
        visible_devices: its CUDA_VISIBLE_DEVICES; None to inherit this process's.
        log_options: logging options of its command line.
        channel, progress, trace, lifeline: descriptors that it inherits.
        module: program of the core.
        python: its interpreter; empty for this process's.
    """

    engine_id: str
    visible_devices: str | None
    log_options: Sequence[str]
    channel: int
    progress: int
    trace: int
    lifeline: int
    module: str
    python: str = ""

    def request(self) -> ForkCore:
        """Return the request for a fork server; send it with ``inherited``, standard output and standard error."""
        return ForkCore(
            version=FORK_VERSION,
            engine_id=self.engine_id,
            environment=self.environment(),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=list(self.log_options),
        )

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that the core inherits, in the order of ``ForkCore``."""
        return self.channel, self.progress, self.trace, self.lifeline

    def environment(self) -> dict[bytes, bytes]:
        """Return this process's environment, with the devices that the core may use."""
        environment = dict(os.environb)
        if self.visible_devices is not None:
            environment[b"CUDA_VISIBLE_DEVICES"] = self.visible_devices.encode()
        return environment


async def start_core(launch: Launch, fork_servers: Sequence[ForkServer], *, may_spawn: bool = True) -> CoreProcess:
    """Start a core with ``launch``, forked by the first of ``fork_servers`` that is reachable and does not refuse.

    Without one the core is started as a new process, which takes longer.

    Raises:
        OSError: the host cannot start another process.
        EngineDeadError: no fork server has forked it, and not ``may_spawn``.
    """
    for address, timeout_s in fork_servers:
        try:
            process = await fork_process(address, launch.request(), [*launch.inherited, 1, 2], timeout_s)
        except NotForkedError as error:
            if not may_spawn:
                raise EngineDeadError(f"no core was forked: {error}") from error
            reason = str(error)
            log.warning(
                "core_not_forked", reason=reason, remedy="the core is started in another way, which takes longer"
            )
        else:
            log.info("core_started", core_pid=process.pid, is_forked=True)
            return process
    process = await _spawn(launch)
    log.info("core_started", core_pid=process.pid, is_forked=False)
    return process


async def _spawn(launch: Launch) -> CoreProcess:
    names = ("--fd", "--progress-fd", "--trace-fd", "--lifeline-fd")
    options = [word for pair in zip(names, map(str, launch.inherited), strict=True) for word in pair]
    return await start_child(
        [launch.python or sys.executable, "-m", launch.module, *options, *launch.log_options],
        env=launch.environment(),
        pass_fds=launch.inherited,
        stdin=asyncio.subprocess.DEVNULL,
    )
