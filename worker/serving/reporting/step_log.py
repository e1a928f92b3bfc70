"""Record each step of an engine in a file, to fit a model of its speed (`penstock sim fit`)."""

from __future__ import annotations

from pathlib import Path

import structlog

from ....shared.messages.core import EngineCoreOutputs
from ....shared.stats import STEPS_SUFFIX, RecordedStep, encode_steps

# At most this many steps are lost if the process is killed.
STEPS_PER_WRITE = 256

log = structlog.get_logger()


class StepLog:
    """Log of steps in ``folder``, in a file with the engine's id; no log if ``folder`` is empty.

    An error of the disk ends the log, but not the engine.
    """

    def __init__(self, folder: str, engine_id: str) -> None:
        self._path = Path(folder) / f"{engine_id}{STEPS_SUFFIX}" if folder else None
        self._steps: list[RecordedStep] = []
        self._ended_s = 0.0
        self._has_more = False

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Record a step; outputs without step statistics are none."""
        if self._path is None or outputs.scheduler_stats is None:
            return
        if outputs.step_stats is not None:
            own_s = outputs.step_stats.step_time_s
            took_s = outputs.timestamp - self._ended_s if self._has_more else own_s
            self._steps.append(RecordedStep(outputs.timestamp, max(own_s, took_s), outputs.step_stats))
        stats = outputs.scheduler_stats
        self._ended_s, self._has_more = outputs.timestamp, stats.num_running_reqs + stats.num_waiting_reqs > 0
        if len(self._steps) >= STEPS_PER_WRITE:
            self.write()

    def write(self) -> None:
        """Write the recorded steps that are not in the file yet."""
        steps, self._steps = self._steps, []
        if self._path is None or not steps:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(encode_steps(steps))
        except OSError as error:
            log.warning("step_log_failed", path=str(self._path), error=str(error))
            self._path = None
