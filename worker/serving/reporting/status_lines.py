"""Status lines for the supervisor: a line of JSON at every change of state, and one per second.

A line includes the heartbeat for Redis, so that the supervisor knows its engines while Redis is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import struct
import sys
import termios

import msgspec

from ....shared.messages.worker_status import EngineState, WorkerStatus
from ...config.worker_config import STATUS_INTERVAL_S
from .heartbeat import Heartbeat


class StatusLines:
    """Writer of status lines to standard output. ``state`` is the last state written."""

    def __init__(self, engine_id: str, heartbeat: Heartbeat) -> None:
        self._engine_id = engine_id
        self._heartbeat = heartbeat
        self.state = EngineState.STARTING

    async def run(self) -> None:
        """Write the state every ``STATUS_INTERVAL_S``, until it is FAILED or this is cancelled."""
        while self.state != EngineState.FAILED:
            # Skip a full pipe, because a paused supervisor reads nothing, and the write would block this process too.
            if select.select([], [sys.stdout], [], 0)[1]:
                await self._heartbeat.refresh(STATUS_INTERVAL_S)
                self.report(self.state)
            await asyncio.sleep(STATUS_INTERVAL_S)

    def report(
        self, state: EngineState, *, code: str = "", message: str = "", trace: str = "", is_external: bool = False
    ) -> None:
        """Set the state, and write a line immediately."""
        self.state = state
        status = WorkerStatus(
            engine_id=self._engine_id,
            state=state,
            code=code,
            message=message,
            trace=trace,
            is_external=is_external,
            num_tokens=self._heartbeat.num_tokens,
            weights_folder=self._heartbeat.weights_folder,
            weights_version=self._heartbeat.weights_version if self._heartbeat.weights_folder else "",
        )
        # Only into an empty pipe, because the some kilobytes of a heartbeat may not fit into one that is partly full.
        if self._heartbeat.encoded and _all_is_read():
            status.heartbeat = msgspec.Raw(self._heartbeat.encoded)
        with contextlib.suppress(BrokenPipeError):  # the supervisor has exited; the end of standard input shows it too
            sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
            sys.stdout.buffer.flush()


def _all_is_read() -> bool:
    """Whether the supervisor has read all lines so far."""
    try:
        unread = fcntl.ioctl(sys.stdout, termios.FIONREAD, struct.pack("i", 0))
    except OSError:
        return False  # standard output is not a pipe, because the process was started by hand
    return struct.unpack("i", unread) == (0,)
