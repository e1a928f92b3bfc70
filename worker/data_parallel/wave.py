"""When a rank of a data-parallel group steps: a state machine without torch, clock or messages.

A forward of a model whose experts the ranks share is a collective: no rank gets its result before all have entered it.
So the invariant is: **all ranks enter the same collectives in the same order.** It holds since a rank that is in a wave
decides by nothing but the number of its steps and by sums that all ranks know:

    idle ──work here, or START of this wave heard──▶ wave
    wave: meet, INTERVAL forwards, meet, INTERVAL forwards, … ──a meeting says that nobody has work──▶ idle, wave + 1

A *meeting* is an all-reduce of what each rank says of itself (``Flags``). Between two of them a rank without work runs
a dummy batch, for the experts that it holds are wanted by the others. Since a wave begins with a meeting, a rank that
was called for nothing computes nothing.

START is sent by whoever begins a wave, and is repeated until the first meeting is over. One that comes late or twice is
of an old wave, or of the one that runs, and does nothing. A request that comes while a meeting says that nobody has
work begins the next wave.

Pause is agreed: a rank that wants to pause says so at meetings, and all that want to do so at the one at which the last
of them says it. A rank that is paused still meets, and while one is paused nobody computes. Whoever wakes up calls a
meeting, so the last one to wake up finds the work of all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from ...shared.groups.errors import GroupBrokenError
from ...shared.messages.waves import WavePhase, WaveState

# Forwards between two meetings. A wave goes on for as many at most when the last request has ended.
INTERVAL = 16


class Action(enum.Enum):
    """What a rank does next. BEGIN: nothing but to tell that it has begun a wave, before it waits for the others."""

    IDLE = enum.auto()
    BEGIN = enum.auto()
    MEET = enum.auto()
    STEP = enum.auto()
    DUMMY = enum.auto()


class Flags(NamedTuple):
    """What a rank says at a meeting: 0 or 1 each, and its wave. The sums over all ranks are what they learn there."""

    has_work: int
    wants_pause: int
    is_paused: int
    wants_to_leave: int
    wave: int


@dataclass(slots=True)
class Wave:
    """One rank's part in the waves of its group.

    Args:
        size: ranks of the group.
        interval: forwards between two meetings.

    Attributes:
        number: of the wave that runs, or of the next one.
        has_left: the group is over for all of its ranks; nothing is to be computed any more.
    """

    size: int
    interval: int = INTERVAL
    number: int = 0
    is_paused: bool = False
    has_left: bool = False
    _is_running: bool = False
    _is_known_to_all: bool = False
    _is_to_meet: bool = False
    _num_steps: int = 0
    _heard: int = -1
    _must_meet: bool = False
    _wants_pause: bool = False
    _wants_to_leave: bool = False
    _others_are_paused: bool = False

    @property
    def state(self) -> WaveState:
        """What the worker process is told."""
        return WaveState(self.number, self._phase)

    @property
    def _phase(self) -> WavePhase:
        if self.has_left:
            return WavePhase.LEFT
        if self._is_running:
            return WavePhase.RUNNING if self._is_known_to_all else WavePhase.STARTING
        return WavePhase.PAUSED if self.is_paused else WavePhase.IDLE

    def hear_start(self, number: int) -> None:
        """Another rank has begun this wave.

        Raises:
            GroupBrokenError: no rank can have got so far.
        """
        if number > self.number + 1:
            raise GroupBrokenError(f"wave {number} was started, and this rank is at {self.number}")
        self._heard = max(self._heard, number)

    def want_pause(self) -> None:
        """Pause as soon as all ranks want to; ``is_paused`` says when. Doing it twice does nothing."""
        if not (self.is_paused or self._wants_pause):
            self._wants_pause = self._must_meet = True

    def resume(self) -> None:
        """Take back the wish to pause, or end the pause."""
        self._wants_pause = False
        if self.is_paused:
            self.is_paused = False
            self._must_meet = True

    def want_to_leave(self) -> None:
        """End the group at the next meeting, for all ranks."""
        if not self._wants_to_leave:
            self._wants_to_leave = self._must_meet = True

    def is_idle(self, *, has_work: bool) -> bool:
        """Whether ``next_action`` is IDLE."""
        return self.has_left or not (self._is_running or self._is_called or self._has_reason(has_work))

    def next_action(self, *, has_work: bool) -> Action:
        """Decide; ``met`` or ``stepped`` comes when it is done, but after IDLE and BEGIN."""
        if self.is_idle(has_work=has_work):
            return Action.IDLE
        if not self._is_running:
            is_called = self._is_called
            self._is_running = self._is_to_meet = True
            self._num_steps = 0
            # Who was called need not call.
            self._is_known_to_all = is_called
            if not is_called:
                return Action.BEGIN
        if self._is_to_meet:
            return Action.MEET
        return Action.STEP if has_work else Action.DUMMY

    def flags(self, *, has_work: bool) -> Flags:
        """What to say at a meeting. Nothing else is called until ``met``: the meeting blocks."""
        self._must_meet = False
        return Flags(int(has_work), int(self._wants_pause), int(self.is_paused), int(self._wants_to_leave), self.number)

    def met(self, sums: Flags) -> None:
        """Learn what all have said.

        Raises:
            GroupBrokenError: they are not in the same wave.
        """
        if sums.wave != self.size * self.number:
            raise GroupBrokenError(f"the ranks of the group met in different waves; this one is in {self.number}")
        self._is_to_meet = False
        self._is_known_to_all = True
        if sums.wants_to_leave:
            self.has_left = True
            self._end()
        elif sums.wants_pause and sums.wants_pause + sums.is_paused == self.size:
            # Whoever does not want to is paused already.
            self.is_paused, self._wants_pause = True, False
            self._end()
        elif sums.is_paused or not sums.has_work:
            self._others_are_paused = sums.is_paused > 0
            self._end()
        else:
            self._others_are_paused = False

    def stepped(self) -> None:
        """A forward is done."""
        self._num_steps += 1
        self._is_to_meet = self._num_steps % self.interval == 0

    @property
    def _is_called(self) -> bool:
        return self._heard >= self.number

    def _has_reason(self, has_work: bool) -> bool:
        """Whether to begin a wave of its own accord."""
        return self._must_meet or (has_work and not self.is_paused and not self._others_are_paused)

    def _end(self) -> None:
        self._is_running = self._is_known_to_all = False
        self.number += 1
