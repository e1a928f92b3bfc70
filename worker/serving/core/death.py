"""Why an engine core ended, and who is to blame: the engine and its requests, or something outside."""

from __future__ import annotations

import signal
from typing import NamedTuple

import msgspec

from ...exit_status import GROUP_BROKEN
from ...process_tree import is_own_fault, is_stopped, stopped_child

# How the traceback of a core ends that has lost a rank (`engine/ranks/errors.py`), to somebody outside or not.
_RANK_LOST = {"RankKilledError": True, "RankLostError": False}


class Cause(NamedTuple):
    """A sentence for people, and whether the death came from outside."""

    reason: str
    is_external: bool


class CoreDeath(msgspec.Struct, frozen=True):
    """How a core ended.

    Args:
        reason: a sentence for people.
        is_external: it was ended from outside, so its requests are not to blame.
        last_step: how many steps it had made.
        trace: its traceback, of Python or of the fault handler; empty if it left none.
    """

    reason: str
    is_external: bool
    last_step: int = 0
    trace: str = ""


def cause_of_exit(returncode: int | None, *, num_oom_kills: int = 0, trace: str = "") -> Cause:
    """Tell from the exit of a core that nobody here has killed.

    Args:
        returncode: as of ``Popen``: minus the signal, if one ended it. None: it let go of its channel but did not exit.
        num_oom_kills: how many processes the kernel has killed for want of memory while the core lived.
        trace: what the core left; that of an exception ends with its name.
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
    """Tell of a core that stalled, as long as it lives: if it was stopped by a signal, the stall is not its own."""
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
