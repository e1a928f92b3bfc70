"""Marks the parts of the core's steps in profiles of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.stats import StepStats
from ..core.engine_core import EngineCore
from ..core.step_watch import StepWatch
from ..scheduling.scheduler_output import SchedulerOutput
from .traces import TraceRecorder

if TYPE_CHECKING:
    from torch.profiler import record_function


class ScopedStepWatch(StepWatch):
    """Marks the parts of a step in a profile, as "engine: schedule", "engine: execute" and "engine: update"."""

    def __init__(self) -> None:
        super().__init__()
        self._scope: record_function | None = None
        self._enter("schedule")

    def scheduled(self, batch: SchedulerOutput) -> None:
        super().scheduled(batch)
        self._enter("execute", f"{len(batch.requests)} requests, {sum(batch.num_new_tokens)} tokens")

    def executed(self) -> None:
        super().executed()
        self._enter("update")

    def pause(self) -> None:
        super().pause()
        self._leave()

    def resume(self) -> None:
        super().resume()
        self._enter("execute", "continued")

    def failed(self) -> None:
        self._leave()

    def updated(self) -> StepStats:
        stats = super().updated()
        self._leave()
        return stats

    def _enter(self, part: str, details: str | None = None) -> None:
        from torch.profiler import record_function

        self._leave()
        self._scope = record_function(f"engine: {part}", details)
        self._scope.__enter__()

    def _leave(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)


class StepProfiler:
    """Makes one recording at a time, each to a separate file. The core marks the parts of its steps meanwhile.

    Args:
        core: the core to record.
        recorder: records the profile.
    """

    def __init__(self, core: EngineCore, recorder: TraceRecorder) -> None:
        self._core = core
        self._recorder = recorder

    def start(self) -> Path:
        """Start recording and return the folder. Raises as ``TraceRecorder``."""
        folder = self._recorder.start()
        self._core.step_watch = ScopedStepWatch
        return folder

    def stop(self) -> Path:
        """Write the trace and return its file. Raises as ``TraceRecorder``."""
        self._core.step_watch = StepWatch
        return self._recorder.stop()
