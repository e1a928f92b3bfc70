"""The engine core that is a rank of a data-parallel group (vLLM's ``DPEngineCoreProc``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from ...shared.errors import EngineDeadError
from ...shared.groups.errors import GroupBrokenError
from ...shared.messages.from_core import EngineCoreOutput, SchedulerStats
from ...shared.messages.waves import LeaveWave, StartWave, WavePhase
from ..core.interface import GroupCore
from ..engine.core.engine_core import WORK_WAIT_S, EngineCore
from .runner import LockstepRunner
from .wave import Action, Flags, Wave

log = structlog.get_logger(__name__)


class GroupedCore(EngineCore, GroupCore):
    """Steps in lockstep with the other ranks; makes the same tokens of the same requests as ``EngineCore``.

    Its statistics tell of the wave. Whoever drives it sends them on after each step, so that the others hear of a wave
    before this rank waits for them.

    Args:
        wave: says what is next.
        meet: sums flags over all ranks.
        runner: the executor.
        parts, named: the arguments of ``EngineCore``.
    """

    def __init__(
        self, wave: Wave, meet: Callable[[Flags], Flags], runner: LockstepRunner, *parts: Any, **named: Any
    ) -> None:
        super().__init__(*parts, **named)
        self.wave = wave
        self._meet = meet
        self._runner = runner
        self.step_fn = self.step_in_wave
        self.num_dummy_batches = 0

    @property
    def has_work(self) -> bool:
        """Whether there is something to do for this rank or for the others."""
        return not self.wave.is_idle(has_work=super().has_work)

    @property
    def has_requests(self) -> bool:
        """Whether there is something to do for this rank."""
        return super().has_work

    def handle_wave_message(self, message: StartWave | LeaveWave) -> None:
        """As ``GroupCore``."""
        if isinstance(message, StartWave):
            self.wave.hear_start(message.wave)
        else:
            self.wave.want_to_leave()

    def step_in_wave(self) -> list[EngineCoreOutput]:
        """Do the next thing of the wave: begin it, meet, or make one forward, with requests or without.

        Raises:
            GroupBrokenError: another rank is gone, or hangs.
            EngineDeadError: a forward has failed here.
        """
        has_requests = self.has_requests
        action = self.wave.next_action(has_work=has_requests)
        if action is Action.IDLE:
            # Called for a question that has no answer yet.
            time.sleep(WORK_WAIT_S)
        elif action is Action.MEET:
            self.wave.met(self._meet(self.wave.flags(has_work=has_requests)))
            if self.wave.state.phase is WavePhase.LEFT:
                log.info("group_left", wave=self.wave.number, num_requests=self.num_unfinished_requests)
        elif action is not Action.BEGIN:
            return self._make_forward(has_requests)
        return []

    def stats(self) -> SchedulerStats:
        """As ``EngineCore``, and where the wave is."""
        stats = super().stats()
        stats.wave = self.wave.state
        return stats

    def _make_forward(self, has_requests: bool) -> list[EngineCoreOutput]:
        before = self._runner.num_forwards
        outputs = self.step() if has_requests else []
        self._check(self._runner.num_forwards - before)
        if self._runner.num_forwards == before:
            # No requests, or none that can be computed yet.
            self._runner.execute_dummy_batch()
            self.num_dummy_batches += 1
        self.wave.stepped()
        return outputs

    def _check(self, num_forwards: int) -> None:
        failure = self._runner.failure
        if isinstance(failure, GroupBrokenError):
            raise failure
        if failure is not None:
            raise EngineDeadError(
                f"a forward failed in the middle of which other ranks wait: {type(failure).__name__}: {failure}"
            ) from failure
        if num_forwards > 1:
            raise EngineDeadError(f"a step made {num_forwards} forwards where the other ranks make one")
