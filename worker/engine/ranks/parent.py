"""A rank that does not outlive the engine core, whatever ends that."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(core_pid: int) -> None:
    """Have the kernel kill this process when the core, its parent, ends; at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != core_pid:
        os._exit(0)
