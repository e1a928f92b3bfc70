"""Starts the worker process of an engine: forked by the fork server of the host, or spawned without one."""

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
from ..processes.forked_process import ForkedProcess, NotForkedError, fork_process
from ..processes.forking import FORK_VERSION, ForkWorker, workers_address

COMMAND = (sys.executable, "-m", "penstock.worker.serving")
# The first worker process of a host waits for the imports of the fork server.
FORK_TIMEOUT_S = 30.0

log = structlog.get_logger()


class WorkerProcess(Protocol):
    """A running worker process, forked or spawned."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes]: ...

    @property
    def stdout(self) -> IO[bytes]: ...

    async def wait(self) -> int:
        """Wait for its end and return its exit status as ``Popen.returncode``."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal. Does nothing after its end."""
        ...


async def start_worker(config: WorkerConfig) -> WorkerProcess:
    """Start a worker process in a new session, so that Ctrl-C reaches only the supervisor.

    If the fork server is away or refuses, the process is spawned, which takes longer.

    Raises:
        OSError: the host cannot start another process.
    """
    forked = await _fork(config) if config.fork_server else None
    process = forked or _Spawned(config.engine_id)
    is_forked = forked is not None
    log.info("worker_started", engine_id=config.engine_id, worker_pid=process.pid, is_forked=is_forked)
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

        # Uses a thread, because the default executor has too few for a host of many engines.
        def wait() -> None:
            process.wait()
            with suppress(RuntimeError):  # the loop has ended, so nothing waits for the event
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
    stdin, stdout = open(ours_out, "wb"), open(ours_in, "rb")  # noqa: SIM115, ASYNC230  # the caller closes them
    try:
        descriptors = [theirs_in, theirs_out, 2]
        process = await fork_process(workers_address(config.fork_server), request, descriptors, FORK_TIMEOUT_S)
    except BaseException as error:
        stdin.close()
        stdout.close()
        if not isinstance(error, NotForkedError):
            raise
        remedy = "it is spawned instead, which takes longer"
        log.warning("worker_not_forked", engine_id=config.engine_id, reason=str(error), remedy=remedy)
        return None
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return _Forked(process, stdin, stdout)
