"""Real `penstock jobs` processes, as an operator starts them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from ...processes import DEADLINE_S


def jobs_command(redis_url: str, namespace: str) -> list[str]:
    """`penstock jobs` with leases that are short, and longer than a busy machine keeps a process waiting."""
    command = [sys.executable, "-m", "penstock.ops.cli", "jobs", "--redis-url", redis_url, "--namespace", namespace]
    return [*command, "--lease-ttl", "4", "--poll-delay", "0.05"]


class JobsProcess:
    """A process that runs jobs; what it says on standard error goes into a file."""

    def __init__(self, command: Sequence[str], log_path: Path, **environment: str) -> None:
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**os.environ, **environment})

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


async def until(condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = 200.0) -> None:
    """Wait for something that another process does."""
    give_up_at = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < give_up_at, what
        await asyncio.sleep(0.02)
