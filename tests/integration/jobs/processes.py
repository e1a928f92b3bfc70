"""Real `penstock jobs` processes, as an operator starts them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path


class JobsProcess:
    """One `penstock jobs`, with short leases; its log is in a file."""

    def __init__(self, redis_url: str, namespace: str, log_path: Path, *options: str) -> None:
        self._log_path = log_path
        command = [sys.executable, "-m", "penstock.ops.cli", "jobs", "--redis-url", redis_url, "--lease-ttl", "1"]
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--namespace", namespace, "--poll-delay", "0.05", *options],
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def until(condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = 90.0) -> None:
    """Wait for something that another process does."""
    give_up_at = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < give_up_at, what
        await asyncio.sleep(0.02)
