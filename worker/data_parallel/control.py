"""Control calls of a rank. Calls that make it compute or sleep are agreed with the other ranks first, or refused."""

from __future__ import annotations

import time

from ...shared.control.calls import CallError
from ...shared.control.engine import CollectiveRpc, ExecuteDummyBatch, IsSleeping, Sleep, SleepState, WakeUp
from ...shared.control.model import ReloadWeights, SaveShardedState
from ...shared.errors import EngineStateError, UnsupportedCallError
from ...shared.messages.core import UtilityCall, UtilityOutput
from ..engine.control.calls import ControlledParts, EngineControl
from ..processes.progress import ProgressWriter
from .core import GroupedCore

# How long to wait until the other ranks are called to sleep as well.
PAUSE_TIMEOUT_S = 10.0

_REFUSED = {
    ExecuteDummyBatch: "the ranks of a data-parallel group run dummy batches themselves, in every wave",
    SaveShardedState: "a rank of a data-parallel group has only a part of the experts; save an engine that has all",
    ReloadWeights: "the ranks of a data-parallel group keep their weights; start a group with the other folder",
}


class GroupedControl(EngineControl):
    """The control of a core that is a rank.

    Sleep waits until all ranks are called to sleep, because a rank that has released its weights cannot compute for
    the others.
    """

    def __init__(self, core: GroupedCore, parts: ControlledParts, progress: ProgressWriter) -> None:
        super().__init__(core, parts, progress)
        self._rank_core = core
        self._give_up_at: float | None = None

    def answer(self, message: UtilityCall) -> UtilityOutput | None:
        """See ``Control``."""
        call = message.call
        if type(call) in _REFUSED:
            return _refusal(message, UnsupportedCallError(_REFUSED[type(call)]))
        if isinstance(call, CollectiveRpc) and call.method == "execute_dummy_batch":
            return _refusal(message, UnsupportedCallError(_REFUSED[ExecuteDummyBatch]))
        if isinstance(call, Sleep):
            return self._sleep_together(message)
        output = super().answer(message)
        if isinstance(call, WakeUp | IsSleeping) and output is not None and isinstance(output.answer, SleepState):
            self._resume_if_awake(output.answer)
        return output

    def _sleep_together(self, message: UtilityCall) -> UtilityOutput | None:
        wave = self._rank_core.wave
        if self._rank_core.has_requests:
            return super().answer(message)  # it refuses because of the requests
        wave.request_pause()
        if wave.is_paused:
            self._give_up_at = None
            return super().answer(message)
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + PAUSE_TIMEOUT_S
        if now < self._give_up_at:
            return None
        self._give_up_at = None
        wave.resume()
        reason = "all ranks of a data-parallel group sleep together; call sleep on all engines of the model at once"
        return _refusal(message, EngineStateError(reason))

    def _resume_if_awake(self, state: SleepState) -> None:
        """Resume the wave if nothing sleeps: after a wake-up, or after a failed sleep whose state is queried."""
        if not state.is_sleeping:
            self._rank_core.wave.resume()


def _refusal(message: UtilityCall, error: UnsupportedCallError | EngineStateError) -> UtilityOutput:
    return UtilityOutput(message.call_id, CallError(error.code, str(error)))
