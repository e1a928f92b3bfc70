"""Runs a model's forwards in a separate thread, so that the engine's loop continues meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput
from .model_runner import ForwardResult, ModelRunner, PreparedStep


class OverlappingRunner:
    """The ``batch_queue.BatchExecutor`` over a ``ModelRunner``.

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
        """See ``batch_queue.BatchExecutor``."""
        try:
            self._prepared = self._runner.begin(output)
        except Exception as error:
            self._computed = Future()
            self._computed.set_exception(error)
        else:
            self._computed = self._thread.submit(self._compute, self._prepared)

    @torch.inference_mode()
    def collect(self) -> SampledTokens:
        """See ``batch_queue.BatchExecutor``."""
        computed = self._computed.result()
        assert self._prepared is not None
        return self._runner.finish(self._prepared, computed)

    @torch.inference_mode()
    def _compute(self, prepared: PreparedStep) -> ForwardResult:
        return self._runner.compute(prepared)
