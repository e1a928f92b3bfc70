"""When a rank of a data-parallel group steps: a state machine without torch, clock or messages.

If ranks share the experts of a model, a forward is a collective: no rank gets its result before all have entered it. So
the invariant is: **all ranks enter the same collectives in the same order.** It holds because a rank in a wave decides
only by the number of its steps and by sums that all ranks know:

    idle ──work on this rank, or START of this wave received──▶ wave
    wave: meet, INTERVAL forwards, meet, INTERVAL forwards, … ──no rank has work at a meeting──▶ idle, wave + 1

A *meeting* is an all-reduce of the state of each rank (``Flags``). Between two meetings a rank without work runs a
dummy batch, because the other ranks need the experts that it holds. A wave begins with a meeting, so a rank that was
called although no rank has work computes nothing.

The rank that begins a wave sends START and repeats it until the first meeting is over. A START that arrives late or
twice belongs to an old wave or to the running one, and is ignored. A request that arrives during the last meeting of a
wave begins the next wave.

A pause is agreed: a rank that requests a pause sets a flag at its meetings, and all ranks pause at the meeting at which
the last of them sets it. A paused rank still meets, and while one is paused no rank computes. A rank that resumes calls
a meeting, so the last one to resume learns of the work of all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ...shared.errors import GroupBrokenError
from ...shared.messages.core import WavePhase, WaveState

# Forwards between two meetings. After the end of the last request a wave runs at most this many more.
INTERVAL = 16


class Action(enum.Enum):
    """The next action of a rank. BEGIN only announces that it has begun a wave, before it waits for the others."""

    IDLE = enum.auto()
    BEGIN = enum.auto()
    MEET = enum.auto()
    STEP = enum.auto()
    DUMMY = enum.auto()


class Flags(NamedTuple):
    """A rank's contribution to a meeting: four numbers that are 0 or 1, and its wave. All ranks get the sums."""

    has_work: int
    wants_pause: int
    is_paused: int
    wants_to_leave: int
    wave: int


@dataclass(slots=True)
class Wave:
    """The state of one rank in the waves of its group.

    Args:
        size: number of ranks in the group.
        interval: forwards between two meetings.

    Attributes:
        number: number of the running wave, or of the next one.
        has_left: whether all ranks have left the group for good. Nothing is computed afterwards.
    """

    size: int
    interval: int = INTERVAL
    number: int = 0
    is_paused: bool = False
    has_left: bool = False
    _is_running: bool = False
    _is_known_to_all: bool = False
    _is_meeting_due: bool = False
    _num_steps: int = 0
    _last_start: int = -1
    _must_meet: bool = False
    _has_pause_request: bool = False
    _has_leave_request: bool = False
    _others_are_paused: bool = False

    @property
    def state(self) -> WaveState:
        """The wave as reported to the worker process."""
        return WaveState(self.number, self._phase)

    @property
    def _phase(self) -> WavePhase:
        if self.has_left:
            return WavePhase.LEFT
        if self._is_running:
            return WavePhase.RUNNING if self._is_known_to_all else WavePhase.STARTING
        return WavePhase.PAUSED if self.is_paused else WavePhase.IDLE

    def receive_start(self, number: int) -> None:
        """Record that another rank has begun wave ``number``.

        Raises:
            GroupBrokenError: no rank can be in this wave yet.
        """
        if number > self.number + 1:
            raise GroupBrokenError(f"wave {number} was started, and this rank is at {self.number}")
        self._last_start = max(self._last_start, number)

    def request_pause(self) -> None:
        """Pause as soon as all ranks have requested it; ``is_paused`` is True then. A repeated call does nothing."""
        if not (self.is_paused or self._has_pause_request):
            self._has_pause_request = self._must_meet = True

    def resume(self) -> None:
        """Withdraw the request to pause, or end the pause."""
        self._has_pause_request = False
        if self.is_paused:
            self.is_paused = False
            self._must_meet = True

    def request_leave(self) -> None:
        """End the group at the next meeting, for all ranks."""
        if not self._has_leave_request:
            self._has_leave_request = self._must_meet = True

    def is_idle(self, *, has_work: bool) -> bool:
        """Return whether ``next_action`` would be IDLE."""
        return self.has_left or not (self._is_running or self._is_called or self._has_reason(has_work))

    def next_action(self, *, has_work: bool) -> Action:
        """Return the next action. Call ``end_meeting`` after MEET, and ``count_step`` after STEP and DUMMY."""
        if self.is_idle(has_work=has_work):
            return Action.IDLE
        if not self._is_running:
            is_called = self._is_called
            self._is_running = self._is_meeting_due = True
            self._num_steps = 0
            # A rank that was called by another need not announce the wave.
            self._is_known_to_all = is_called
            if not is_called:
                return Action.BEGIN
        if self._is_meeting_due:
            return Action.MEET
        return Action.STEP if has_work else Action.DUMMY

    def flags(self, *, has_work: bool) -> Flags:
        """Return this rank's contribution to a meeting. Call nothing else before ``end_meeting``."""
        self._must_meet = False
        return Flags(
            has_work=int(has_work),
            wants_pause=int(self._has_pause_request),
            is_paused=int(self.is_paused),
            wants_to_leave=int(self._has_leave_request),
            wave=self.number,
        )

    def end_meeting(self, sums: Flags) -> None:
        """Apply the sums of a meeting.

        Raises:
            GroupBrokenError: the ranks are not all in the same wave.
        """
        if sums.wave != self.size * self.number:
            raise GroupBrokenError(f"the ranks of the group met in different waves; this one is in {self.number}")
        self._is_meeting_due = False
        self._is_known_to_all = True
        if sums.wants_to_leave:
            self.has_left = True
            self._end_wave()
        elif sums.wants_pause and sums.wants_pause + sums.is_paused == self.size:
            # The ranks that do not request a pause are paused already.
            self.is_paused, self._has_pause_request = True, False
            self._end_wave()
        elif sums.is_paused or not sums.has_work:
            self._others_are_paused = sums.is_paused > 0
            self._end_wave()
        else:
            self._others_are_paused = False

    def count_step(self) -> None:
        """Count a forward that is done."""
        self._num_steps += 1
        self._is_meeting_due = self._num_steps % self.interval == 0

    @property
    def _is_called(self) -> bool:
        return self._last_start >= self.number

    def _has_reason(self, has_work: bool) -> bool:
        """Return whether this rank should begin a wave itself."""
        return self._must_meet or (has_work and not self.is_paused and not self._others_are_paused)

    def _end_wave(self) -> None:
        self._is_running = self._is_known_to_all = False
        self.number += 1
