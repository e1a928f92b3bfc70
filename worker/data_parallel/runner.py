"""The executor of a rank. It counts its forwards and stores the error of a failed one."""

from __future__ import annotations

import torch

from ..engine.core.step_input import IntArray, StepInput
from ..engine.execution.model_runner import ModelRunner


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
