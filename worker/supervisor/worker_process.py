"""Starts the worker process of an engine: forked by the host's fork server where there is one, else from nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Protocol

import structlog

from ..config.worker_config import WorkerConfig
from ..forked_process import ForkedProcess, NotForkedError, fork_process
from ..forking import FORK_VERSION, ForkWorker, workers_address

COMMAND = (sys.executable, "-m", "penstock.worker.serving")
# The first of a host waits until the fork server has its imports, as it would for its own.
FORK_TIMEOUT_S = 30.0

log = structlog.get_logger()


class WorkerProcess(Protocol):
    """A running worker process, whoever its parent is."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes]: ...

    @property
    def stdout(self) -> IO[bytes]: ...

    async def wait(self) -> int:
        """Return its exit status as ``Popen.returncode``, once it has ended."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Any signal; does nothing once it has ended."""
        ...


async def start_worker(config: WorkerConfig) -> WorkerProcess:
    """Start one, in a session of its own: Ctrl-C reaches the supervisor only, which decides.

    A fork server that is away or refuses costs time, never the start.

    Raises:
        OSError: the host has no room for another process.
    """
    forked = await _fork(config) if config.fork_server else None
    process = forked or _Spawned(config.engine_id)
    told = {"engine_id": config.engine_id, "worker_pid": process.pid, "is_forked": forked is not None}
    log.info("worker_started", **told)
    return process


class _Spawned:
    def __init__(self, engine_id: str) -> None:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self.stdin, self.stdout = process.stdin, process.stdout
        self.send_signal = process.send_signal
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._process, self._ended = process, ended

        # In a thread of its own: the default executor has too few for a host of many engines.
        def wait() -> None:
            process.wait()
            with suppress(RuntimeError):  # the loop has ended before: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=wait, name=f"wait-{engine_id}", daemon=True).start()

    async def wait(self) -> int:
        await self._ended.wait()
        return self._process.returncode


class _Forked:
    def __init__(self, process: ForkedProcess, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = process.pid
        self.wait = process.wait
        self.stdin, self.stdout = stdin, stdout
        self._process = process

    def send_signal(self, number: int, /) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


async def _fork(config: WorkerConfig) -> _Forked | None:
    request = ForkWorker(
        version=FORK_VERSION,
        engine_id=config.engine_id,
        environment=dict(os.environb),
        folder=os.getcwdb(),
        module_paths=sys.path,
    )
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    stdin, stdout = open(ours_out, "wb"), open(ours_in, "rb")  # noqa: SIM115, ASYNC230  # who serves with them closes them
    try:
        descriptors = [theirs_in, theirs_out, 2]
        process = await fork_process(workers_address(config.fork_server), request, descriptors, FORK_TIMEOUT_S)
    except BaseException as error:
        stdin.close()
        stdout.close()
        if not isinstance(error, NotForkedError):
            raise
        remedy = "it is started by itself, which takes longer"
        log.warning("worker_not_forked", engine_id=config.engine_id, reason=str(error), remedy=remedy)
        return None
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return _Forked(process, stdin, stdout)
