"""What the engine core wants of whoever runs the model."""

from __future__ import annotations

from typing import Protocol

from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput


class AcceleratorError(Exception):
    """The device itself reported an error while it ran a step."""


class Executor(Protocol):
    """Runs one step's work on the model."""

    @property
    def device_memory_bytes(self) -> int:
        """What it has taken of an accelerator's memory; 0 without one."""
        ...

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Compute ``output`` and return the new tokens of each request; none where none is due yet.

        The request's grammar, if it has one, has accepted them by then.

        Raises:
            AcceleratorError: the device failed.
        """
        ...
