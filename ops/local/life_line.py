"""Ending of started processes when this process ends, even if it is killed before it could stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

# Reads until its input is closed, waits for the processes that must end first, and ends its process.
_KEEPER = """
read -r _; own=$1; shift
for other; do while kill -0 "$other"; do sleep 0.1; done; done
kill -s TERM "$own"
"""
EXIT_TERMINATED = 128 + signal.SIGTERM


def unwind_on_sigterm() -> None:
    """Let SIGTERM leave all ``with`` blocks of the main thread, as Ctrl-C does, unless it has a handler already."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


class LifeLine:
    """A helper process that sends SIGTERM to a process when this one has ended, even by kill -9; until ``release``.

    Args:
        pid: id of the process to end.
        after: ids of processes that must have ended before.
    """

    def __init__(self, pid: int, after: Sequence[int] = ()) -> None:
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "penstock-life-line", str(pid), *map(str, after)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """Stop watching the process. A second call does nothing."""
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
