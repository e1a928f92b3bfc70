"""Ends what this process has started, should it be told to end, or be killed, before it has stopped that itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

# Reads until the other end of its input is gone, waits for the processes that are to end before, and ends its own.
_KEEPER = """
read -r _; own=$1; shift
for other; do while kill -0 "$other"; do sleep 0.1; done; done
kill -s TERM "$own"
"""
EXIT_TERMINATED = 128 + signal.SIGTERM


def unwind_on_sigterm() -> None:
    """Let SIGTERM leave all ``with`` blocks of the main thread, as Ctrl-C does, unless somebody handles it already."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))


class LifeLine:
    """Sends SIGTERM to a process when this one is gone, even by kill -9; until ``release``.

    Args:
        pid: of the process.
        after: processes that are to have ended before.
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
        """Leave the process alone from now on; doing it twice does nothing."""
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
