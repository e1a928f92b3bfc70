"""The engine core that is a rank of a data-parallel group (vLLM's ``DPEngineCoreProc``), and its executor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
import torch

from ...shared.errors import EngineDeadError, GroupBrokenError
from ...shared.messages.core import EngineCoreOutput, LeaveWave, SchedulerStats, StartWave, WavePhase
from ..core.interface import GroupCore
from ..engine.core.engine_core import WORK_WAIT_S, EngineCore
from ..engine.core.step_input import IntArray, StepInput
from ..engine.execution.model_runner import ModelRunner
from .wave import Action, Flags, Wave

log = structlog.get_logger(__name__)


class LockstepRunner(ModelRunner):
    """A ``ModelRunner`` whose forwards are collectives.

    Attributes:
        num_forwards: forwards begun so far.
        failure: the exception of a failed forward. No further step is possible, because the other ranks still wait in
            that forward.
    """

    num_forwards = 0
    failure: Exception | None = None

    def _forward(self, step: StepInput, logit_rows: IntArray) -> torch.Tensor:
        self.num_forwards += 1
        try:
            return super()._forward(step, logit_rows)
        except Exception as error:
            self.failure = error
            raise


class GroupedCore(EngineCore, GroupCore):
    """Steps in lockstep with the other ranks; produces the same tokens as ``EngineCore`` for the same requests.

    Its statistics contain the wave. The core's loop sends them after each step, so the other ranks learn of a wave
    before this rank waits for them.

    Args:
        wave: decides the next action.
        meet: return the sums of the flags over all ranks.
        runner: the executor.
        args, options: the arguments of ``EngineCore``.
    """

    def __init__(
        self, wave: Wave, meet: Callable[[Flags], Flags], runner: LockstepRunner, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.wave = wave
        self._meet = meet
        self._runner = runner
        self.step_fn = self.step_in_wave
        self.num_dummy_batches = 0

    @property
    def has_work(self) -> bool:
        """Whether this rank or another one has work."""
        return not self.wave.is_idle(has_work=super().has_work)

    @property
    def has_requests(self) -> bool:
        """Whether this rank has requests."""
        return super().has_work

    def handle_wave_message(self, message: StartWave | LeaveWave) -> None:
        """See ``GroupCore``."""
        if isinstance(message, StartWave):
            self.wave.receive_start(message.wave)
        else:
            self.wave.request_leave()

    def step_in_wave(self) -> list[EngineCoreOutput]:
        """Do the next action of the wave: begin it, meet, or run one forward, with requests or without.

        Raises:
            GroupBrokenError: another rank has exited or hangs.
            EngineDeadError: a forward failed on this rank.
        """
        has_requests = self.has_requests
        action = self.wave.next_action(has_work=has_requests)
        if action is Action.IDLE:
            # The loop calls a step while a control call has no answer yet.
            time.sleep(WORK_WAIT_S)
        elif action is Action.MEET:
            self.wave.end_meeting(self._meet(self.wave.flags(has_work=has_requests)))
            if self.wave.state.phase is WavePhase.LEFT:
                log.info("group_left", wave=self.wave.number, num_requests=self.num_unfinished_requests)
        elif action is not Action.BEGIN:
            return self._run_forward(has_requests)
        return []

    def stats(self) -> SchedulerStats:
        """Return the statistics of ``EngineCore`` with the state of the wave."""
        stats = super().stats()
        stats.wave = self.wave.state
        return stats

    def _run_forward(self, has_requests: bool) -> list[EngineCoreOutput]:
        before = self._runner.num_forwards
        outputs = self.step() if has_requests else []
        self._check_forwards(self._runner.num_forwards - before)
        if self._runner.num_forwards == before:
            # Since there are no requests, or none can be computed yet.
            self._runner.execute_dummy_batch()
            self.num_dummy_batches += 1
        self.wave.count_step()
        return outputs

    def _check_forwards(self, num_forwards: int) -> None:
        failure = self._runner.failure
        if isinstance(failure, GroupBrokenError):
            raise failure
        if failure is not None:
            raise EngineDeadError(
                f"a forward failed while other ranks wait for its result: {type(failure).__name__}: {failure}"
            ) from failure
        if num_forwards > 1:
            raise EngineDeadError(f"a step ran {num_forwards} forwards, while the other ranks run one")
