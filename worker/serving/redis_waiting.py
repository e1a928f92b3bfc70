"""Wait for a Redis that is slow: delay output while it is overloaded, and give up soon once this process stops.

Redis runs commands on one core, and a delta costs it the same time whatever its size. While Redis has time to spare,
readers get their tokens as they are generated. When it is overloaded, every engine that writes to it delays its deltas,
so that fewer of them carry the same tokens. The delay doubles at each check at which Redis is still overloaded, and
halves once its load is low. Between the two thresholds it stays the same, so that engines do not oscillate together. An
engine that writes nothing checks nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Coroutine
from typing import Any

import structlog
from redis.exceptions import ResponseError

from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from ...shared.keys import ModelKeys

CHECK_EVERY_S = 2.0
# Used shares of the core that runs commands.
HIGH_LOAD, LOW_LOAD = 0.75, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 0.5

log = structlog.get_logger()
# How long a stopping engine waits for each reply of Redis. Nothing is lost without the reply, because leases and
# registrations expire, and other workers reclaim the requests.
LEAVE_PATIENCE_S = 3.0


class RedisPressure:
    """Load of one Redis server, and the delay of output that follows from it.

    Attributes:
        pause_s: shortest delay of output in seconds; 0 while Redis has time to spare. ``run`` updates it while
            ``output_pause_s`` is called.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self.pause_s = 0.0
        self._key = keys.leases
        self._connection = connection
        self._last: tuple[float, float] | None = None
        self._has_output = asyncio.Event()

    def output_pause_s(self) -> float:
        """Return ``pause_s`` to a caller that writes output now, and request a check of Redis."""
        self._has_output.set()
        return self.pause_s

    async def run(self) -> None:
        """Check Redis until cancelled. Where INFO is not allowed, output is not delayed."""
        while True:
            # While output is delayed, check even without output, so that the delay ends during a quiet time.
            if not self.pause_s and not self._has_output.is_set():
                await self._has_output.wait()
                self._last = None  # the load during a quiet time says nothing about the present
            self._has_output.clear()
            try:
                await self.check()
            except RedisUnavailableError:
                self._last = None  # its load meanwhile says nothing about the present
            except ResponseError as error:
                log.warning("redis_cpu_unknown", error=str(error))
                self.pause_s = 0.0
                return
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> None:
        """Ask Redis for its CPU time, and adjust the delay of output."""
        info = await self._connection.link_to(self._key).execute("INFO", "cpu")
        self.record_cpu(cpu_seconds(info.decode()), time.monotonic())

    def record_cpu(self, cpu_s: float, at_s: float) -> None:
        """Adjust the delay after a reading of Redis's total CPU time, taken at ``at_s`` of any monotonic clock."""
        last, self._last = self._last, (cpu_s, at_s)
        if last is None or cpu_s < last[0] or at_s <= last[1]:
            return  # the first reading, or the server has restarted
        share = (cpu_s - last[0]) / (at_s - last[1])
        last_pause_s = self.pause_s
        if share > HIGH_LOAD:
            self.pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * last_pause_s))
        elif share < LOW_LOAD:
            self.pause_s = last_pause_s / 2 if last_pause_s > FIRST_PAUSE_S else 0.0
        if bool(last_pause_s) != bool(self.pause_s):
            if self.pause_s:
                log.info("output_throttled", redis_cpu_share=round(share, 2))
            else:
                log.info("output_throttling_ended", redis_cpu_share=round(share, 2))


def cpu_seconds(info: str) -> float:
    """Return the CPU seconds of the thread that runs commands, or of all threads, from the reply to ``INFO cpu``.

    Raises:
        ResponseError: the reply contains neither.
    """
    for suffix in ("_main_thread", ""):
        values = re.findall(rf"^used_cpu_(?:sys|user){suffix}:([\d.]+)\r?$", info, re.MULTILINE)
        if len(values) == 2:
            return float(values[0]) + float(values[1])
    raise ResponseError("INFO cpu does not contain used_cpu_sys and used_cpu_user")


async def until_first(tasks: Collection[asyncio.Task[Any]], *events: asyncio.Event) -> list[asyncio.Task[Any]]:
    """Wait until a task ends or an event is set. Return the tasks that have ended."""
    signals = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([*tasks, *signals], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for signal in signals:
            signal.cancel()
    return [task for task in tasks if task.done()]


async def until_leaving(
    work: Coroutine[Any, Any, Any] | asyncio.Task[Any], *leaving: asyncio.Event, patience_s: float = LEAVE_PATIENCE_S
) -> bool:
    """Wait for ``work`` without a limit; once one of ``leaving`` is set, wait ``patience_s`` more and then cancel it.

    Returns whether it ended without being cancelled. Raises the exception of ``work``, if any.
    """
    task = asyncio.ensure_future(work)
    try:
        await until_first([task], *leaving)
        await asyncio.wait([task], timeout=patience_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return False
    task.result()
    return True
