"""Runs batches in the background: on a device, in a separate thread, or in the stages of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...models.forward import StagedSteps
from ..core.step_input import IntArray
from ..scheduling.scheduler_output import AcceleratorError, SampledTokens, SchedulerOutput
from .batch import ExpectedTokens
from .model_runner import ForwardResult, ModelRunner, PreparedStep


class Reading(Protocol):
    """A copy of a tensor to the host, under way."""

    def wait(self) -> IntArray:
        """Wait until the host has the numbers, and return them."""
        ...


class PinnedCopy:
    """The ``Reading`` of integers ``[R]`` on a device, into pinned memory; on the CPU of a copy."""

    def __init__(self, numbers: Tensor) -> None:
        is_cuda = numbers.device.type == "cuda"
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=is_cuda)
        self._copy.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event() if is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> IntArray:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


@dataclass(frozen=True)
class _Sampled:
    """Tokens ``[R]`` of a step on the device, and their copy to the host."""

    token_ids: Tensor
    expected: ExpectedTokens
    reading: Reading


@dataclass(frozen=True)
class _Launched:
    """A step that was launched; ``result`` has its logits if it is sampled when it is collected."""

    prepared: PreparedStep
    result: ForwardResult | _Sampled


class FeedingRunner:
    """The ``batches.BatchExecutor`` over a ``ModelRunner`` whose device computes in the order of the launches.

    The tokens of a step stay on the device, where the next step reads them, and the host reads them one step late. A
    step whose sampling depends on earlier tokens, or that returns more than tokens, is sampled in ``collect``, and the
    next one is launched afterwards. Those are steps with penalties, grammars, thinking budgets, bad words of several
    tokens, logits processors, or log probabilities.

    Args:
        read: starts to copy tokens to the host.
    """

    def __init__(self, runner: ModelRunner, read: Callable[[Tensor], Reading] = PinnedCopy) -> None:
        self._runner = runner
        self._read = read
        self._launched: deque[_Launched | Exception] = deque()

    @property
    def feeds_next(self) -> bool:
        """See ``batches.BatchExecutor``."""
        return self._last_sampled is not None

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> None:
        """See ``batches.BatchExecutor``."""
        try:
            launched: _Launched | Exception = self._begin(output)
        except torch.AcceleratorError as error:
            launched = AcceleratorError(str(error))
        except Exception as error:
            launched = error
        self._launched.append(launched)

    @torch.inference_mode()
    def collect(self) -> SampledTokens:
        """See ``batches.BatchExecutor``."""
        launched = self._launched.popleft()
        if isinstance(launched, Exception):
            raise launched
        if isinstance(launched.result, ForwardResult):
            return self._runner.finish(launched.prepared, launched.result)
        try:
            token_ids = launched.result.reading.wait()
        except torch.AcceleratorError as error:
            self._launched.appendleft(launched)  # for ``discard``
            self.discard()
            raise AcceleratorError(str(error)) from error
        return self._runner.receive(launched.prepared, launched.result.expected, token_ids)

    def discard(self) -> None:
        """See ``batches.BatchExecutor``."""
        while self._launched:
            launched = self._launched.pop()
            if isinstance(launched, _Launched) and isinstance(launched.result, _Sampled):
                self._runner.forget(launched.result.expected)

    @property
    def _last_sampled(self) -> _Sampled | None:
        """Tokens of the last step that was launched, if they are on the device."""
        last = self._launched[-1] if self._launched else None
        return last.result if isinstance(last, _Launched) and isinstance(last.result, _Sampled) else None

    def _begin(self, output: SchedulerOutput) -> _Launched:
        runner, before = self._runner, self._last_sampled
        prepared = runner.begin(output, None if before is None or not len(before.token_ids) else before.token_ids)
        computed = runner.compute(prepared)
        if not runner.samples_alone(prepared):
            return _Launched(prepared, computed)
        token_ids, expected = runner.sample_unread(prepared, computed.logits)
        return _Launched(prepared, _Sampled(token_ids, expected, self._read(token_ids)))


class OverlappingRunner:
    """The ``batches.BatchExecutor`` over a ``ModelRunner``.

    Only the forward runs in the thread. If it is a single call of compiled code, it releases the GIL to the loop. If it
    is many calls, the two threads alternate, and little is gained.
    """

    # The host reads the tokens of a batch before the next one.
    feeds_next = False

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

    def discard(self) -> None:
        """See ``batches.BatchExecutor``. The next batch is launched after this one was collected, so there is none."""

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
