"""Starts the process of an engine core: forked by the fork server where there is one, else from nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog

from ....shared.child_process import start_child
from ...forked_process import NotForkedError, fork_process
from ...forking import FORK_VERSION, ForkCore

# The first core of a host waits until the fork server has imported all, as it would for its own imports.
FORK_TIMEOUT_S = 120.0

log = structlog.get_logger(__name__)


class CoreProcess(Protocol):
    """A running core, whoever its parent is."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return its exit status as ``Popen.returncode``, once it has ended."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Any signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        ...


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a core is started with.

    Args:
        engine_id: whose core it is.
        visible_devices: its CUDA_VISIBLE_DEVICES; None leaves the environment alone.
        log_options: options of its command line that say how it logs.
        channel, progress, trace: descriptors that it inherits.
        module: the program of its core.
        python: the interpreter; empty: this one.
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
        """What asks a fork server for this core, to be sent with ``channel``, ``progress``, ``trace``, out and err."""
        return ForkCore(
            version=FORK_VERSION,
            engine_id=self.engine_id,
            environment=self.environment(),
            folder=os.getcwdb(),
            module_paths=sys.path,
            log_options=list(self.log_options),
        )

    def environment(self) -> dict[bytes, bytes]:
        """This process's own, with the devices it may see."""
        environment = dict(os.environb)
        if self.visible_devices is not None:
            environment[b"CUDA_VISIBLE_DEVICES"] = self.visible_devices.encode()
        return environment


async def start_core(launch: Launch, fork_server: str) -> CoreProcess:
    """Start a core as ``launch`` says; ``fork_server`` is the socket of one, or empty.

    A fork server that is away or refuses costs time, never the start.

    Raises:
        OSError: the host has no room for another process.
    """
    if fork_server:
        try:
            descriptors = [launch.channel, launch.progress, launch.trace, 1, 2]
            process = await fork_process(fork_server, launch.request(), descriptors, FORK_TIMEOUT_S)
        except NotForkedError as error:
            reason = str(error)
            log.warning("core_not_forked", reason=reason, remedy="it is started by itself, which takes longer")
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
