"""What the engine core wants of whoever runs the model."""

from __future__ import annotations

from typing import Protocol

from .scheduling.scheduler_output import SampledTokens, SchedulerOutput


class AcceleratorError(Exception):
    """The device itself reported an error while it ran a step."""


class Executor(Protocol):
    """Runs one step's work on the model."""

    @property
    def device_memory_bytes(self) -> int:
        """What it has taken of an accelerator's memory; 0 without one."""
        ...

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Compute ``output`` and return a new token for each request, or ``NO_TOKEN`` where one is not due yet.

        Raises:
            AcceleratorError: the device failed.
        """
        ...
