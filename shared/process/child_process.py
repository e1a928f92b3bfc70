"""Child processes whose exit status only their waiter reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any


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
