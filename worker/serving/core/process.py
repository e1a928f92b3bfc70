"""Start the process of an engine core: forked by the fork server if one runs, otherwise as a new process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from ....shared.process.children import start_child
from ...processes.forking import FORK_VERSION, ForkCore, NotForkedError, fork_process

# The first core of a host waits until the fork server has imported its modules, which takes as long as in the core.
FORK_TIMEOUT_S = 120.0

log = structlog.get_logger(__name__)


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
        engine_id: id of the engine that the core belongs to.
        visible_devices: its CUDA_VISIBLE_DEVICES; None to inherit this process's.
        log_options: logging options of its command line.
        channel, progress, trace: descriptors that it inherits.
        module: program of the core.
        python: its interpreter; empty for this process's.
    """

    engine_id: str
    visible_devices: str | None
    log_options: Sequence[str]
    channel: int
    progress: int
    trace: int
    module: str
    python: str = ""

    def request(self) -> ForkCore:
        """Return the request for a fork server; send it with the descriptors channel, progress, trace, out and err."""
        return ForkCore(
            version=FORK_VERSION,
            engine_id=self.engine_id,
            environment=self.environment(),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=list(self.log_options),
        )

    def environment(self) -> dict[bytes, bytes]:
        """Return this process's environment, with the devices that the core may use."""
        environment = dict(os.environb)
        if self.visible_devices is not None:
            environment[b"CUDA_VISIBLE_DEVICES"] = self.visible_devices.encode()
        return environment


async def start_core(launch: Launch, fork_server: str) -> CoreProcess:
    """Start a core with ``launch``. ``fork_server`` is the socket of a fork server, or empty.

    If the fork server is unreachable or refuses, the core is started as a new process, which takes longer.

    Raises:
        OSError: the host cannot start another process.
    """
    if fork_server:
        try:
            descriptors = [launch.channel, launch.progress, launch.trace, 1, 2]
            process = await fork_process(fork_server, launch.request(), descriptors, FORK_TIMEOUT_S)
        except NotForkedError as error:
            reason = str(error)
            log.warning("core_not_forked", reason=reason, remedy="the core starts as a new process, which takes longer")
        else:
            log.info("core_started", core_pid=process.pid, is_forked=True)
            return process
    process = await _spawn(launch)
    log.info("core_started", core_pid=process.pid, is_forked=False)
    return process


async def _spawn(launch: Launch) -> CoreProcess:
    inherited = (launch.channel, launch.progress, launch.trace)
    names = ("--fd", "--progress-fd", "--trace-fd")
    options = [word for pair in zip(names, map(str, inherited), strict=True) for word in pair]
    return await start_child(
        [launch.python or sys.executable, "-m", launch.module, *options, *launch.log_options],
        env=launch.environment(),
        pass_fds=inherited,
        stdin=asyncio.subprocess.DEVNULL,
    )
