"""Runs batches in the background: in a separate thread, or in the stages of a model."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ...models.forward import StagedSteps
from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput
from .model_runner import ForwardResult, ModelRunner, PreparedStep


class OverlappingRunner:
    """The ``batches.BatchExecutor`` over a ``ModelRunner``.

    Only the forward runs in the thread. If it is a single call of compiled code, it releases the GIL to the loop. If it
    is many calls, the two threads alternate, and little is gained.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # Each thread has its own setting for the number of torch threads.
        self._thread = ThreadPoolExecutor(1, "forward", torch.set_num_threads, (torch.get_num_threads(),))
        self._prepared: PreparedStep | None = None
        self._computed: Future[ForwardResult] = Future()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> None:
        """See ``batches.BatchExecutor``."""
        try:
            self._prepared = self._runner.begin(output)
        except Exception as error:
            self._computed = Future()
            self._computed.set_exception(error)
        else:
            self._computed = self._thread.submit(self._compute, self._prepared)

    @torch.inference_mode()
    def collect(self) -> SampledTokens:
        """See ``batches.BatchExecutor``."""
        computed = self._computed.result()
        assert self._prepared is not None
        return self._runner.finish(self._prepared, computed)

    @torch.inference_mode()
    def _compute(self, prepared: PreparedStep) -> ForwardResult:
        return self._runner.compute(prepared)


class StagedRunner:
    """The ``batches.StagedExecutor`` over a ``ModelRunner``: this process computes the first stage.

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
        """See ``batches.StagedExecutor``."""
        prepared = self._runner.begin(output)
        self._steps.start(self._runner.input_of(prepared.step, prepared.logit_rows))
        self._prepared.append(prepared)

    @torch.inference_mode()
    def collect(self) -> SampledTokens:
        """See ``batches.StagedExecutor``."""
        prepared = self._prepared.popleft()
        return self._runner.finish(prepared, self._runner.forward_result_of(prepared, self._steps.finish()))
