"""How short of time Redis is, and how long output waits for that.

Redis runs commands on one core, which it spends on deltas, whatever they carry. While it has time to spare, readers get
their tokens as they come. When it has not, every engine that writes to it lets deltas wait a little longer, so that
fewer of them carry the same tokens: twice as long at each look at which Redis is still short, half as long once it is
not. Between the two marks nothing changes, so that engines do not swing together. An engine that writes nothing asks
nothing.
"""

from __future__ import annotations

import asyncio
import re
import time

import structlog
from redis.exceptions import ResponseError

from ...shared.connection import CommandConnection
from ...shared.errors import RedisUnavailableError
from ...shared.keys import ModelKeys

LOOK_EVERY_S = 2.0
# Shares of the core that runs commands.
SHORT, AT_EASE = 0.75, 0.5
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 0.5

log = structlog.get_logger()


class RedisPressure:
    """``pause_s`` is how long output waits at least; 0 while Redis has time to spare. ``run`` keeps it true, as long as
    ``pause_of_output`` is asked for.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self.pause_s = 0.0
        self._key = keys.leases
        self._connection = connection
        self._last: tuple[float, float] | None = None
        self._has_output = asyncio.Event()

    def pause_of_output(self) -> float:
        """Return ``pause_s`` to who writes some now, and have Redis looked at."""
        self._has_output.set()
        return self.pause_s

    async def run(self) -> None:
        """Look for ever. Where INFO is not allowed nothing is known, and nothing waits."""
        while True:
            # A pause is looked at until it is over: what comes after a quiet time is not to wait for what was before.
            if not self.pause_s and not self._has_output.is_set():
                await self._has_output.wait()
                self._last = None  # the share of a quiet time says nothing of this one
            self._has_output.clear()
            try:
                await self.look()
            except RedisUnavailableError:
                self._last = None  # what it did meanwhile says nothing
            except ResponseError as error:
                log.warning("redis_cpu_unknown", error=str(error))
                self.pause_s = 0.0
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask Redis for its CPU time, and settle how long output waits."""
        info = await self._connection.link_to(self._key).execute("INFO", "cpu")
        self.note(cpu_seconds(info.decode()), time.monotonic())

    def note(self, cpu_s: float, at_s: float) -> None:
        """Take a reading of the CPU time that Redis has used in all, at a time of any monotonic clock."""
        before, self._last = self._last, (cpu_s, at_s)
        if before is None or cpu_s < before[0] or at_s <= before[1]:
            return  # the first, or a server that was started anew
        share = (cpu_s - before[0]) / (at_s - before[1])
        was = self.pause_s
        if share > SHORT:
            self.pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * was))
        elif share < AT_EASE:
            self.pause_s = was / 2 if was > FIRST_PAUSE_S else 0.0
        if bool(was) != bool(self.pause_s):
            if self.pause_s:
                log.info("output_waits_for_redis", redis_cpu_share=round(share, 2))
            else:
                log.info("output_waits_no_more", redis_cpu_share=round(share, 2))


def cpu_seconds(info: str) -> float:
    """The CPU time of the thread that runs commands, by the reply to ``INFO cpu``; of all threads if that is missing.

    Raises:
        ResponseError: it tells neither.
    """
    for suffix in ("_main_thread", ""):
        found = re.findall(rf"^used_cpu_(?:sys|user){suffix}:([\d.]+)\r?$", info, re.MULTILINE)
        if len(found) == 2:
            return float(found[0]) + float(found[1])
    raise ResponseError("INFO cpu tells no used_cpu_sys and used_cpu_user")
