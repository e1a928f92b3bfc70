"""The executor of a rank: it knows how many forwards it has made, and whether one has failed."""

from __future__ import annotations

import torch

from ..engine.core.step_input import IntArray, StepInput
from ..engine.execution.model_runner import ModelRunner


class LockstepRunner(ModelRunner):
    """A ``ModelRunner`` whose forwards are collectives.

    Attributes:
        num_forwards: begun so far.
        failure: what a forward has raised. It left the others in the middle of it, so no step can be made any more.
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
