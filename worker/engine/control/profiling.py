"""Records what torch does, step by step, when somebody asks for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from ....shared.errors import EngineStateError
from ....shared.stats import StepStats
from ..core import EngineCore
from ..scheduling.scheduler_output import SchedulerOutput
from ..step_watch import StepWatch

if TYPE_CHECKING:
    from torch.profiler import profile, record_function

log = structlog.get_logger(__name__)


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

    def failed(self) -> None:
        self._leave()

    def updated(self) -> StepStats:
        stats = super().updated()
        self._leave()
        return stats

    def _enter(self, part: str, what: str | None = None) -> None:
        from torch.profiler import record_function

        self._leave()
        self._scope = record_function(f"engine: {part}", what)
        self._scope.__enter__()

    def _leave(self) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)


class StepProfiler:
    """One recording at a time, each to a file of its own. The core marks the parts of its steps meanwhile.

    Args:
        core: whose steps are recorded.
        folder: where traces go; made when the first is begun.
        name: begins the files' names.
    """

    def __init__(self, core: EngineCore, folder: Path, name: str) -> None:
        self._core = core
        self._folder = folder
        self._name = name.replace("/", "_")
        self._profile: profile | None = None

    def start(self) -> Path:
        """Record from now on; returns the folder.

        Raises:
            EngineStateError: a recording runs already, or the folder cannot be written to.
        """
        import torch.profiler
        from torch._C._profiler import _ExperimentalConfig

        if self._profile is not None:
            raise EngineStateError("a profile is being recorded already; stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineStateError(f"the folder of profiles cannot be made: {error}; set --profile-dir") from error
        if not os.access(self._folder, os.W_OK):
            raise EngineStateError(f"the folder of profiles {self._folder} is not writable; set --profile-dir")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Forwards may have a thread of their own.
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        recording = torch.profiler.profile(activities=activities, experimental_config=all_threads)
        recording.start()
        self._profile = recording
        self._core.step_watch = ScopedStepWatch
        return self._folder

    def stop(self) -> Path:
        """Write the trace and return its file.

        Raises:
            EngineStateError: nothing is being recorded, or the file cannot be written; the recording is over then.
        """
        recording, self._profile = self._profile, None
        if recording is None:
            raise EngineStateError("no profile is being recorded; start one first")
        self._core.step_watch = StepWatch
        recording.stop()
        path = self._folder / f"{self._name}-{os.getpid()}-{time.time_ns()}.json"
        try:
            recording.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise EngineStateError(f"the profile cannot be written to {path}: {error}") from error
        log.info("profile_saved", path=str(path))
        return path
