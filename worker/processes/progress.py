"""Progress of an engine core, in memory shared with its worker process.

The core writes a few numbers as it works, and the worker process reads them at any time. So progress is visible while
the core holds the GIL, computes, compiles, or is stopped, and a hang is visible without the core's cooperation.

Each number is an aligned 64-bit word with one writer, read and written atomically. The words are not read together: a
reader may see the new phase with the old counter, and must not draw conclusions from a single reading.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

_MAGIC = int.from_bytes(b"penstk\x00\x01", "little")  # the last byte is the layout's version
_NUM_BYTES = 64
_MAGIC_AT, _PHASE, _STEPS, _PHASE_ENTERED_NS, _STEP_ENDED_NS, _NUM_UNFINISHED, _MESSAGES_TAKEN = range(7)


class Phase(enum.IntEnum):
    """Activity of a core. STARTING and COMPILING have no time limit."""

    STARTING = 0
    COMPILING = 1
    IDLE = 2
    STEPPING = 3


class Progress(msgspec.Struct, frozen=True):
    """A reading of a core's progress.

    Args:
        step_counter: number of completed steps.
        phase_entered_ns: when the phase began, by ``time.monotonic_ns``, whose clock all processes share.
        step_ended_ns: when the last step ended; 0 before the first.
        num_unfinished_reqs: number of requests in the core.
        num_messages_taken: number of messages of the worker process that the core has processed.
    """

    phase: Phase = Phase.STARTING
    step_counter: int = 0
    phase_entered_ns: int = 0
    step_ended_ns: int = 0
    num_unfinished_reqs: int = 0
    num_messages_taken: int = 0


class ProgressReader:
    """The worker process's side, which creates the memory; the core inherits ``fd``.

    Attributes:
        num_messages_sent: number of messages sent to the core; updated by the sender.
    """

    def __init__(self) -> None:
        self.num_messages_sent = 0
        self.fd = os.memfd_create("penstock-progress")
        os.ftruncate(self.fd, _NUM_BYTES)
        self._words = memoryview(mmap.mmap(self.fd, _NUM_BYTES)).cast("Q")
        self._words[_MAGIC_AT] = _MAGIC

    def read(self) -> Progress:
        words = self._words
        return Progress(
            phase=Phase(words[_PHASE]),
            step_counter=words[_STEPS],
            phase_entered_ns=words[_PHASE_ENTERED_NS],
            step_ended_ns=words[_STEP_ENDED_NS],
            num_unfinished_reqs=words[_NUM_UNFINISHED],
            num_messages_taken=words[_MESSAGES_TAKEN],
        )

    def close(self) -> None:
        """Close ``fd`` after a core has inherited it; ``read`` still works."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ProgressWriter:
    """The core's side.

    Args:
        fd: descriptor of a ``ProgressReader``; None for an engine without a worker process.

    Raises:
        ValueError: ``fd`` does not contain a progress block of this version.
    """

    def __init__(self, fd: int | None = None, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        # mmap keeps a duplicate of the descriptor.
        self._words = memoryview(mmap.mmap(-1 if fd is None else fd, _NUM_BYTES)).cast("Q")
        if fd is not None:
            os.close(fd)
            if self._words[_MAGIC_AT] != _MAGIC:
                raise ValueError("the file descriptor does not contain a progress block of this version")
        self.enter(Phase.STARTING)

    def enter(self, phase: Phase) -> None:
        """Set the phase."""
        # Write the time first, so that a reader of the new phase does not see an older time.
        self._words[_PHASE_ENTERED_NS] = self._clock_ns()
        self._words[_PHASE] = phase

    def end_step(self, num_unfinished_reqs: int) -> None:
        """Count a completed step."""
        self._words[_STEP_ENDED_NS] = self._clock_ns()
        self._words[_NUM_UNFINISHED] = num_unfinished_reqs
        self._words[_STEPS] += 1

    def take_message(self, num_unfinished_reqs: int) -> None:
        """Count a processed message."""
        # Write the requests first, so that a request is always visible as a message or as unfinished.
        self._words[_NUM_UNFINISHED] = num_unfinished_reqs
        self._words[_MESSAGES_TAKEN] += 1

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Mark work that may take long and must not count as a stall: kernels, graphs, grammars."""
        former_phase = Phase(self._words[_PHASE])
        self.enter(Phase.COMPILING)
        try:
            yield
        finally:
            self.enter(former_phase)
