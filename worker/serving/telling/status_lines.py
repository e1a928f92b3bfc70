"""What a worker process tells its supervisor: a line of JSON at every change of state, and one a second.

With it goes what the heartbeat tells Redis, so that the supervisor knows its engines while Redis is away.
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
    """Writes to standard output. ``state`` is the one that was told last."""

    def __init__(self, engine_id: str, heartbeat: Heartbeat) -> None:
        self._engine_id = engine_id
        self._heartbeat = heartbeat
        self.state = EngineState.STARTING

    async def run(self) -> None:
        """Tell the state again and again, until it has failed or this is cancelled."""
        while self.state != EngineState.FAILED:
            # A supervisor that is stopped reads nothing, and a full pipe would stop us, too.
            if select.select([], [sys.stdout], [], 0)[1]:
                await self._heartbeat.look_again(STATUS_INTERVAL_S)
                self.report(self.state)
            await asyncio.sleep(STATUS_INTERVAL_S)

    def report(
        self, state: EngineState, *, code: str = "", message: str = "", trace: str = "", is_external: bool = False
    ) -> None:
        """Write a line now."""
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
        # It has some kilobytes, for which a pipe that is not full may still have no room.
        if self._heartbeat.told and _all_is_read():
            status.heartbeat = msgspec.Raw(self._heartbeat.told)
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the lifeline says so too
            sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
            sys.stdout.buffer.flush()


def _all_is_read() -> bool:
    """Whether the supervisor has read all lines so far."""
    try:
        unread = fcntl.ioctl(sys.stdout, termios.FIONREAD, struct.pack("i", 0))
    except OSError:
        return False  # no pipe: somebody has started this by hand
    return struct.unpack("i", unread) == (0,)
