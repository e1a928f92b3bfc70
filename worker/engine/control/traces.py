"""Profiles of torch: recorded on request, with marks for the parts of the core's steps."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog

from ....shared.control.engine import StartProfile
from ....shared.errors import ConfigurationError, EngineStateError
from ....shared.stats import StepStats
from ....shared.values.data_folder import data_folder
from ...config.engine_config import EngineConfig
from ..core.engine_core import EngineCore, StepWatch
from ..scheduling.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from torch.profiler import profile, record_function

log = structlog.get_logger(__name__)


class TraceRecorder(Protocol):
    """Makes one recording at a time, each to a separate file."""

    def start(self, call: StartProfile) -> Path:
        """Start recording and return the folder.

        Raises:
            EngineStateError: a recording runs already, or the folder cannot be written to.
        """
        ...

    def stop(self) -> Path:
        """Write the trace and return its file.

        Raises:
            EngineStateError: nothing is being recorded, or the file cannot be written; the recording is over then.
        """
        ...


class ProcessTraceRecorder:
    """The ``TraceRecorder`` of this process.

    Args:
        config: names the folder, which is created at the first recording.
        suffix: appended to the model's name in the names of files.
    """

    def __init__(self, config: EngineConfig, suffix: str = "") -> None:
        self._folder = _profile_folder(config)
        self._name = config.model_name.replace("/", "_") + suffix
        self._call = StartProfile()
        self._profile: profile | None = None

    def start(self, call: StartProfile) -> Path:
        """See ``TraceRecorder``."""
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
        # All threads, because forwards may run in a separate thread.
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        recording = torch.profiler.profile(
            activities=activities, with_stack=call.with_stack, experimental_config=all_threads
        )
        recording.start()
        self._call = call
        self._profile = recording
        return self._folder

    def stop(self) -> Path:
        """See ``TraceRecorder``."""
        recording, self._profile = self._profile, None
        if recording is None:
            raise EngineStateError("no profile is being recorded; start one first")
        recording.stop()
        suffix = ".json.gz" if self._call.use_gzip else ".json"
        path = self._folder / f"{self._call.prefix}{self._name}-{os.getpid()}-{time.time_ns()}{suffix}"
        try:
            recording.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise EngineStateError(f"the profile cannot be written to {path}: {error}") from error
        log.info("profile_saved", path=str(path))
        return path


def _profile_folder(config: EngineConfig) -> Path:
    if config.profile_dir:
        return Path(config.profile_dir)
    try:
        return data_folder() / "profiles"
    except ConfigurationError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / "penstock-profiles"


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
        self._leave_scope()

    def resume(self) -> None:
        super().resume()
        self._enter("execute", "continued")

    def failed(self) -> None:
        self._leave_scope()

    def updated(self) -> StepStats:
        stats = super().updated()
        self._leave_scope()
        return stats

    def _enter(self, part: str, details: str | None = None) -> None:
        from torch.profiler import record_function

        self._leave_scope()
        self._scope = record_function(f"engine: {part}", details)
        self._scope.__enter__()

    def _leave_scope(self) -> None:
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

    def start(self, call: StartProfile) -> Path:
        """Start recording and return the folder. Raises as ``TraceRecorder``."""
        folder = self._recorder.start(call)
        self._core.step_watch = ScopedStepWatch
        return folder

    def stop(self) -> Path:
        """Write the trace and return its file. Raises as ``TraceRecorder``."""
        self._core.step_watch = StepWatch
        return self._recorder.stop()
