"""Runs the batches of a model that is split into stages."""

from __future__ import annotations

from collections import deque

import torch

from ...models.forward import StagedSteps
from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput
from .model_runner import ModelRunner, PreparedStep


class StagedRunner:
    """The ``staged_batches.StagedExecutor`` over a ``ModelRunner``: this process computes the first stage.

    Args:
        runner: prepares the inputs and samples the tokens.
        steps: forwards of its model.
    """

    def __init__(self, runner: ModelRunner, steps: StagedSteps) -> None:
        self._runner = runner
        self._steps = steps
        self._prepared: deque[PreparedStep] = deque()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> None:
        """See ``staged_batches.StagedExecutor``."""
        prepared = self._runner.begin(output)
        self._steps.start(self._runner.input_of(prepared.step, prepared.logit_rows))
        self._prepared.append(prepared)

    @torch.inference_mode()
    def collect(self) -> SampledTokens:
        """See ``staged_batches.StagedExecutor``."""
        prepared = self._prepared.popleft()
        return self._runner.finish(prepared, self._runner.forward_result_of(prepared, self._steps.finish()))
