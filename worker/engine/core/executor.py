"""The interface through which the engine core runs the model."""

from __future__ import annotations

from typing import Protocol

from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput


class AcceleratorError(Exception):
    """The device itself reported an error while it ran a step."""


class Executor(Protocol):
    """Runs one scheduled step on the model."""

    @property
    def device_memory_bytes(self) -> int:
        """Bytes of accelerator memory in use; 0 without an accelerator."""
        ...

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Compute ``output`` and return the new tokens of each request; none before the end of its prompt.

        The request's grammar, if it has one, has already accepted them.

        Raises:
            AcceleratorError: the device failed.
        """
        ...
