"""Killing a process together with everything it started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil


def kill_process_tree(pid: int) -> None:
    """SIGKILL ``pid``, its descendants, and the process group it leads; does nothing if all are gone.

    Two ways of finding them, because each misses some: a descendant may have left the group, and one whose parent
    has died is a descendant no longer.
    """
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
