"""Child processes: their exit status, which only their waiter reads, and the delay before a dead one is restarted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A process that ran for this long after it was ready resets the delay.
STABLE_AFTER_S = 60.0


class ChildProcess:
    """A child that asyncio has started, with signals of our own.

    Until Python 3.13 asyncio's signals poll first. That reaps a child which has just ended, and who waits for it is
    told of an unknown child with exit status 255 (CPython issue 87744).
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status as in ``Popen.returncode``; None until it is known."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return ``returncode``, once it has ended."""
        return await self._process.wait()

    def send_signal(self, number: int, /) -> None:
        """Send any signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self._process.returncode is not None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        os.kill(self.pid, number)


async def start_child(command: Sequence[str], **options: Any) -> ChildProcess:
    """Start a child; ``options`` are those of ``asyncio.create_subprocess_exec``.

    Raises:
        OSError: the program does not exist, or the host is out of processes.
    """
    return ChildProcess(await asyncio.create_subprocess_exec(*command, **options))


def restart_delay_s(num_deaths_in_a_row: int) -> float:
    """Return 0, 0.5, 1, 2, 4, ... s, capped. Most deaths are single, so the first restart is immediate."""
    if num_deaths_in_a_row == 1:
        return 0.0
    # The exponent is limited as well, since a row of deaths may last for days.
    return min(FIRST_DELAY_S * 2 ** min(num_deaths_in_a_row - 2, 16), MAX_DELAY_S)
