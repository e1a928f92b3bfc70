"""Classify the end of an engine core by its exit and its traceback: caused by its requests, or from outside."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import NamedTuple

import msgspec

from ...processes.ipc import GROUP_BROKEN
from ...processes.process_tree import is_own_fault, is_stopped, stopped_child

# Exceptions of a core that has lost a rank (`engine/ranks/team.py`), and whether the cause was external.
_RANK_LOST = {"RankKilledError": True, "RankLostError": False}
MAX_BYTES = 1 << 16
POLL_S = 0.02
# Several, because between two lines a core on a busy machine may wait for a processor.
NUM_UNCHANGED_POLLS = 5


class Cause(NamedTuple):
    """Cause of a death: a sentence for people, and whether it came from outside."""

    reason: str
    is_external: bool


class CoreDeath(msgspec.Struct, frozen=True):
    """End of a core.

    Args:
        reason: a sentence for people.
        is_external: whether it was ended from outside, so that its requests are not the cause.
        last_step: number of steps that it had executed.
        trace: its traceback, of Python or of the fault handler; empty without one.
    """

    reason: str
    is_external: bool
    last_step: int = 0
    trace: str = ""


def cause_of_exit(returncode: int | None, *, num_oom_kills: int = 0, trace: str = "") -> Cause:
    """Return the cause of the exit of a core that this process did not kill.

    Args:
        returncode: as that of ``Popen``: the negative number of a signal that ended it. None if it closed its channel
            but did not exit.
        num_oom_kills: number of processes that the kernel killed for lack of memory while the core ran.
        trace: traceback of the core; that of an exception ends with the exception's name and message.
    """
    if trace and (returncode is None or returncode > 0):
        last_line = trace.splitlines()[-1]
        kind, _, words = last_line.partition(": ")
        is_external = _RANK_LOST.get(kind.rpartition(".")[2])
        if is_external is None:
            return Cause(f"the engine core died of {last_line}", is_external=returncode == GROUP_BROKEN)
        if is_external and num_oom_kills > 0:
            return Cause(f"the engine ran out of memory: {words}", is_external=False)
        return Cause(f"the engine lost a rank: {words}", is_external=is_external)
    if returncode is None:
        return Cause("the engine core closed its channel and did not exit", is_external=False)
    if returncode >= 0:
        return Cause(f"the engine core ended with exit status {returncode}", is_external=False)
    number = -returncode
    if number == signal.SIGKILL and num_oom_kills > 0:
        return Cause("the engine core ran out of memory: the kernel killed it", is_external=False)
    return Cause(f"the engine core was killed by {_signal_name(number)}", is_external=not is_own_fault(number))


def cause_of_stall(sentence: str, pid: int) -> Cause:
    """Return the cause of a stall, while the core still exists: external if a signal has stopped it or a rank."""
    if is_stopped(pid):
        return Cause(f"{sentence}: it was stopped by a signal", is_external=True)
    rank_pid = stopped_child(pid)
    if rank_pid is not None:
        return Cause(f"{sentence}: its rank of process id {rank_pid} was stopped by a signal", is_external=True)
    return Cause(sentence, is_external=False)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class CoreTrace:
    """A file in memory that the core inherits. The core's fault handler writes to it even if the core hangs."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("penstock-trace")

    def read(self) -> str:
        """Return the text written so far; empty if the core wrote none."""
        text = os.pread(self.fd, MAX_BYTES, 0).decode(errors="replace")
        # Cut off the list of some hundred extension modules with which the fault handler ends.
        return text.partition("\nExtension modules:")[0].strip()

    async def settle(self, timeout_s: float) -> None:
        """Wait until text is written and does not grow any more, at most ``timeout_s``."""
        size = num_unchanged = 0
        for _ in range(round(timeout_s / POLL_S)):
            await asyncio.sleep(POLL_S)
            last_size, size = size, os.fstat(self.fd).st_size
            num_unchanged = num_unchanged + 1 if size == last_size > 0 else 0
            if num_unchanged == NUM_UNCHANGED_POLLS:
                return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
