"""Worker process of an engine as the supervisor sees it: how it starts, reports, falls silent and ends.

It is forked by the fork server of the host, or spawned without one. It reads its configuration and writes status lines,
one every ``STATUS_INTERVAL_S``, also while it loads. It counts as dead when the line is overdue by ``stall_timeout_s``,
because it is stopped or hangs; then it is killed. Two spans do not count: the time in which the supervisor itself did
not run, because the lines of that time are unread in the pipe; and the time in which the worker process was runnable
without a processor.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, Protocol

import msgspec
import structlog

from ...shared.control.engine import Sleep, SleepState, WakeUp
from ...shared.errors import EngineDeadError, RedisUnavailableError, from_wire
from ...shared.messages.supervision import STALLED, Activation, EngineState, SleepOrder, SleepOrderDone, WorkerStatus
from ..config.worker_config import STATUS_INTERVAL_S, WorkerConfig
from ..processes.forking import FORK_VERSION, ForkedProcess, ForkWorker, NotForkedError, fork_process, workers_address
from ..processes.host import waited_for_processor_s
from ..processes.process_tree import group_lives, is_stopped, kill_group, kill_process_tree
from .restart import Death

# A status may carry a long traceback.
MAX_STATUS_LINE_BYTES = 1 << 22
# The last lines are in the pipe already. The pipe ends when the engine core has ended, too.
LAST_LINES_TIMEOUT_S = 2.0
# A killed core frees its GPU memory only when it has ended, and the next core measures the free memory.
GROUP_END_TIMEOUT_S = 5.0
GROUP_POLL_S = 0.02
SIGNALS_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

log = structlog.get_logger()
COMMAND = (sys.executable, "-m", "penstock.worker.serving")
# The first worker process of a host waits for the imports of the fork server.
FORK_TIMEOUT_S = 30.0
MAX_INTERVAL_S = 0.25
MAX_OVERSLEEP_S = 1.0

_order_ids = itertools.count(1)
# Covers the start of the interpreter and its imports, which are slow on a host that starts many engines.
FIRST_REPORT_TIMEOUT_S = 60.0


class EngineProcess:
    """A worker process, which serves one engine or stands by for it.

    Attributes:
        on_change: called after a change of any other attribute.
        state: last reported state.
        failure: last report of a failure; None without one.
        ended: set together with ``exit_code``.
        last_report_at: time of its last line, by the loop's clock; before the first line, the time of its start.
        has_reported: whether any line has arrived.
        heartbeat: its last ``EngineHeartbeat``, as JSON; empty before the first.
        sleep_level: level at which the engine slept last, and its next process should; 0 if it was awake.
        num_wishes: number of operators' calls to wake it up, if its device has several models.
        is_held: whether an operator put it to sleep and did not wake it since, in that case.
        weights: folder and version of the weights that replaced the configured ones; empty before.
        exit_code: as ``Popen.returncode``, None while it runs; set after its last lines were read.
    """

    def __init__(self, config: WorkerConfig, on_change: Callable[[EngineProcess], None]) -> None:
        self.engine_id = config.engine_id
        self.state = EngineState.STARTING
        self.failure: WorkerStatus | None = None
        self.last_report_at = 0.0
        self.has_reported = False
        self.heartbeat = b""
        self.sleep_level = config.starts_asleep
        self.num_wishes = 0
        self.is_held = False
        self.weights = ("", "")
        self.exit_code: int | None = None
        self.ended = asyncio.Event()
        self.on_change = on_change
        self.config = config
        self._num_tokens = 0
        self._had_waited_s = 0.0
        self._silence: Death | None = None
        self._is_killed = False
        self._process: WorkerProcess | None = None
        self._has_cause = asyncio.Event()
        self._has_left = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._orders: dict[int, asyncio.Future[SleepState]] = {}

    @property
    def alive(self) -> bool:
        return self._process is not None and self.exit_code is None

    async def start(self) -> None:
        """Start the process and send it its configuration.

        Raises:
            OSError: the host cannot start another process.
        """
        process = await start_worker(self.config)
        self._process = process
        self.last_report_at = asyncio.get_running_loop().time()
        # The configuration fits into the pipe.
        self._write_line(self.config)
        reading = asyncio.create_task(self._read_statuses(process.stdout))
        self._tasks = [reading, asyncio.create_task(self._watch_exit(process, reading))]

    def activate(self, num_restarts: int) -> None:
        """Let a process on standby serve, as soon as its model is loaded."""
        self._write_line(Activation(num_restarts=num_restarts))

    def describe_last_report(self, now: float) -> str:
        """Return its state, its process and the age of its last report, for people. ``now`` is of the loop's clock."""
        pid = self._process.pid if self._process is not None else 0
        return f"{self.state.value}, process {pid}, last report {now - self.last_report_at:.0f} s ago"

    async def order(self, call: Sleep | WakeUp) -> SleepState:
        """Have the engine sleep or wake up, also while Redis is away; return the state that it reports.

        Raises:
            EngineDeadError: the process has ended.
            PenstockError: the call failed.
        """
        if self._process is None or not self.alive:
            raise EngineDeadError("the worker process has ended")
        order_id = next(_order_ids)
        answer = self._orders[order_id] = asyncio.get_running_loop().create_future()
        self._write_line(SleepOrder(order_id=order_id, call=call))
        try:
            return await answer
        finally:
            del self._orders[order_id]

    def drain(self) -> None:
        """Ask it to finish its running requests, for as long as its configuration allows, and to leave."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def hand_back(self) -> None:
        """Ask it to release its running requests and leave: the end of its standard input says so."""
        self.drain()
        self._close_life_line()

    def kill(self) -> None:
        """Kill it and everything it started."""
        # Never after its end, because another process may have its pid by then.
        if self._process is not None and self.alive:
            self._is_killed = True
            kill_process_tree(self._process.pid)

    def starved_s(self) -> float:
        """Return for how long it has waited for a processor since its last line, in seconds."""
        return self._waited_s() - self._had_waited_s

    @property
    def was_killed_by_supervisor(self) -> bool:
        """Whether the supervisor killed it only because it did not leave in time."""
        has_failed = self.failure is not None and not self.failure.is_external
        return self._is_killed and self._silence is None and not has_failed

    async def gone(self) -> None:
        """Wait until it and the processes that it started have ended; at most ``GROUP_END_TIMEOUT_S``."""
        if self._process is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(GROUP_END_TIMEOUT_S):
                await self._process.wait()
                while group_lives(self._process.pid):  # noqa: ASYNC110  # no event tells the end of a process that is not a child
                    await asyncio.sleep(GROUP_POLL_S)

    def kill_for_silence(self, silence_s: float) -> None:
        """Kill it because it has not reported for ``silence_s``. A second call does nothing."""
        if self._process is None or self._silence is not None:
            return
        stopped = is_stopped(self._process.pid)
        reason = f"the worker process said nothing for {silence_s:.1f} s: it {'was stopped' if stopped else 'hangs'}"
        self._silence = Death(reason, is_external=stopped, code=STALLED)
        self.kill()

    async def cause_of_death(self) -> Death:
        """Return why it ends, once that is known: it has reported a failure, or has ended.

        A call that the core cannot answer any more fails before.
        """
        await self._has_cause.wait()
        return self.death()

    def death(self) -> Death:
        """Return why it ended, by its own report if it sent one."""
        return msgspec.structs.replace(self._cause(), num_tokens=self._num_tokens, was_asleep=self.sleep_level > 0)

    def _cause(self) -> Death:
        failure = self.failure
        if failure is not None:
            # A Redis that is away ends every engine, and a restart helps.
            is_external = failure.is_external or failure.code == RedisUnavailableError.code
            return Death(failure.message, is_external=is_external, trace=failure.trace, code=failure.code)
        if self._silence is not None:
            return self._silence
        if self.exit_code is not None and self.exit_code < 0:
            number = signal.Signals(-self.exit_code)
            return Death(f"the worker process was killed by {number.name}", is_external=number in SIGNALS_FROM_OUTSIDE)
        # Status 0: the worker process was drained by a signal that the supervisor did not send.
        return Death(f"the worker process ended with status {self.exit_code}", is_external=self.exit_code == 0)

    async def _watch_exit(self, process: WorkerProcess, reading: asyncio.Task[None]) -> None:
        exiting = asyncio.create_task(process.wait())
        leaving = asyncio.create_task(self._has_left.wait())
        try:
            await asyncio.wait([exiting, leaving], return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():
                # The engine core of a crashed worker would go on using the GPU and keep the pipe open.
                kill_process_tree(process.pid)
                status = exiting.result()
                await asyncio.wait([reading], timeout=LAST_LINES_TIMEOUT_S)
            else:
                # It has failed and left. It takes tens of milliseconds to end; a standby need not wait for that.
                kill_group(process.pid)
                status = -signal.SIGKILL
        finally:
            for task in (exiting, leaving, reading):
                task.cancel()
            self._close_life_line()
        self.exit_code = status
        self.ended.set()
        self._has_cause.set()
        for answer in self._orders.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(self.death().reason))
        self.on_change(self)

    async def _read_statuses(self, pipe: IO[bytes]) -> None:
        reader = asyncio.StreamReader(limit=MAX_STATUS_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await _next_line(reader):
                self._read_line(line)
        finally:
            transport.close()

    def _read_line(self, line: bytes) -> None:
        try:
            status = msgspec.json.decode(line, type=WorkerStatus)
        except msgspec.DecodeError:
            # The engine core shares this pipe, and libraries print to it.
            if text := line.decode(errors="replace").rstrip():
                log.info("engine_output", engine_id=self.engine_id, line=text)
            return
        if status.state != self.state:
            log.debug("engine_state", engine_id=self.engine_id, state=status.state.value)
        self.state = status.state
        self.has_reported = True
        self.last_report_at = asyncio.get_running_loop().time()
        self._had_waited_s = self._waited_s()
        self._num_tokens = max(self._num_tokens, status.num_tokens)
        self.heartbeat = bytes(status.heartbeat) or self.heartbeat
        self.sleep_level = status.sleep_level
        self.num_wishes, self.is_held = status.num_wishes, status.is_held
        if status.weights_folder:
            self.weights = (status.weights_folder, status.weights_version)
        if status.state == EngineState.FAILED:
            self.failure = status
            self._has_cause.set()
        elif status.state == EngineState.STOPPED and self.failure is not None:
            self._has_left.set()
        if status.done is not None:
            self._end_order(status.done)
        self.on_change(self)

    def _end_order(self, outcome: SleepOrderDone) -> None:
        answer = self._orders.get(outcome.order_id)
        if answer is None or answer.done():
            return  # its caller has left
        if outcome.error is not None:
            answer.set_exception(from_wire(outcome.error.code, outcome.error.message, retryable=False))
        elif outcome.state is not None:
            answer.set_result(outcome.state)

    def _waited_s(self) -> float:
        return waited_for_processor_s(self._process.pid) if self._process is not None and self.alive else 0.0

    def _write_line(self, message: WorkerConfig | SleepOrder | Activation) -> None:
        """Write a line to its standard input. Its end is reported by ``ended``."""
        assert self._process is not None
        if self._process.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _close_life_line(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line; a note in place of one that is too long; b"" at the end."""
    try:
        return await reader.readline()
    except ValueError:
        # The reader has dropped it. It is not a status, so a library has printed without an end of line.
        return f"more than {MAX_STATUS_LINE_BYTES} bytes without an end of line were dropped\n".encode()


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
        engine_id=config.process_id,
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


class SilenceWatch:
    """Watch over worker processes that must report.

    Args:
        config: gives the timeout.
        processes: returns the processes that are expected to report.
    """

    def __init__(self, config: WorkerConfig, processes: Callable[[], Iterable[EngineProcess]]) -> None:
        self._timeout_s = STATUS_INTERVAL_S + config.stall_timeout_s
        self._interval_s = min(MAX_INTERVAL_S, config.stall_timeout_s / 4)
        # Bounded by half of a short timeout, or that much time asleep would look like silence.
        self._max_oversleep_s = min(MAX_OVERSLEEP_S, config.stall_timeout_s / 2)
        self._processes = processes

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        awake_since = checked_at = clock()
        while True:
            await asyncio.sleep(self._interval_s)
            now = clock()
            if now - checked_at > self._interval_s + self._max_oversleep_s:
                log.warning("supervisor_paused", gap_s=round(now - checked_at, 1))
                awake_since = now
            checked_at = now
            self.check(now, awake_since)

    def check(self, now: float, awake_since: float) -> None:
        """Kill processes whose last report is too old. Both times are of the loop's clock, in seconds."""
        for process in self._processes():
            silence_s = now - max(process.last_report_at, awake_since)
            timeout_s = self._timeout_s if process.has_reported else max(self._timeout_s, FIRST_REPORT_TIMEOUT_S)
            if silence_s > timeout_s and silence_s - process.starved_s() > timeout_s:
                process.kill_for_silence(now - process.last_report_at)
