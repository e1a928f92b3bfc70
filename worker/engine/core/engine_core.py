"""The engine core: computes the tokens of requests, without process or socket, and times the parts of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from ....shared.errors import EngineDeadError, ValidationError
from ....shared.messages.core import EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.kinds import GENERATE
from ....shared.stats import StepStats
from ...request_checks import check_prompt_length, check_served, check_task, refusal
from ..images.interface import Images, NoImages
from ..logits_processors import PROCESSOR_FAILED, LogitsProcessors, ProcessedRequest, ProcessorFailedError
from ..own_ordering import ORDERING_FAILED, Key, OrderingFailedError, nothing_to_rank
from ..sampling.param_checks import check_in_vocabulary, check_params
from ..scheduling.admission import Adapters, Grammars, NoAdapters, NoGrammars
from ..scheduling.batches import Isolation
from ..scheduling.prompt_inputs import ImageSpan, check_prompt_embeds, extra_keys_of, prompt_of
from ..scheduling.request import STATUS_OF_REASON, Request, RequestStatus
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_output import AcceleratorError, Executor, SampledTokens, SchedulerOutput
from ..scheduling.stop import check_stop
from .dump import StepDump

STEP_FAILED = "engine_step_failed"
# A failed accelerator usually stays failed, so the process ends after two more failed steps.
MAX_ACCELERATOR_FAILURES = 3
# If requests wait for work of other threads and nothing else can be computed, a step waits this long before the loop
# reads messages again.
WORK_WAIT_S = 0.01

log = structlog.get_logger(__name__)


def nothing_left() -> bool:
    """Return False: there is nothing to prepare."""
    return False


class EngineCore:
    """The scheduler and executor of a model.

    ``step`` computes one batch from beginning to end. ``LookaheadCore`` schedules the next batch meanwhile, and
    ``PipelinedCore`` has several in flight.

    Attributes:
        step_fn: the variant of ``step`` that this core uses.
        prepare_more: see ``Core``; by default nothing is left.
        step_watch: creates the timer of a step; a profiler replaces it.
        images: messages that wait for their images, and cached results of earlier images.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        images: Images | None = None,
        dump: StepDump | None = None,
        embeds_hidden_size: int | None = None,
        processors: LogitsProcessors | None = None,
        rank: Callable[[Request], Key] = nothing_to_rank,
    ) -> None:
        self.scheduler = scheduler
        self._dump = dump or StepDump()
        self._executor = executor
        self.step_fn = self.step
        self.prepare_more: Callable[[], bool] = nothing_left
        self._grammars = NoGrammars() if grammars is None else grammars
        self._adapters = NoAdapters() if adapters is None else adapters
        self.images = NoImages() if images is None else images
        self._embeds_hidden_size = embeds_hidden_size
        self._processors = LogitsProcessors() if processors is None else processors
        self._rank = rank
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_accelerator_failures = 0
        self._isolation = Isolation()
        self._step_stats: StepStats | None = None
        self.step_watch: Callable[[], StepWatch] = StepWatch

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests or self._num_before_scheduler > 0

    @property
    def num_unfinished_requests(self) -> int:
        return self.scheduler.num_unfinished_requests + self._num_before_scheduler

    @property
    def _num_before_scheduler(self) -> int:
        """Number of requests that wait for images, grammars or adapters before they enter the scheduler."""
        return len(self.images) + len(self._grammars) + len(self._adapters)

    @property
    def device_memory_bytes(self) -> int:
        return self._executor.device_memory_bytes

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request; return its final output if it is refused, or was already complete when resumed."""
        stages = (self.scheduler, self.images, self._grammars, self._adapters)
        if any(message.request_id in stage for stage in stages):
            log.warning("request_already_here", request_id=message.request_id)
            return None
        if not message.images:
            return self._enter(message)
        try:
            check_served(message)
            self.images.add(message)
        except ValidationError as error:
            return refusal(message.request_id, error)
        return None

    def _enter(self, message: EngineCoreRequest, images: tuple[ImageSpan, ...] = ()) -> EngineCoreOutput | None:
        """Queue a request whose prompt is complete, with the tokens of its images; returns as ``add_request``."""
        try:
            request = self._make_request(message, images)
            request.order_key = self._rank(request)
            stop = check_stop(request)
            if stop is not None:
                return EngineCoreOutput(message.request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
            if request.params.structured_outputs is not None:
                self._grammars.add(request)
            else:
                self._admit(request)
        except ValidationError as error:
            return refusal(message.request_id, error)
        except OrderingFailedError as error:
            return _failed(message.request_id, RequestError(ORDERING_FAILED, str(error)))
        return None

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop computing these requests without an output. Unknown and finished ones are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._grammars.abort(request_ids)
        self._adapters.abort(request_ids)
        self.images.abort(request_ids)

    def step(self) -> list[EngineCoreOutput]:
        """Admit requests whose images, grammars and adapters are ready, then schedule, execute and update one batch.

        If a batch raises, the next steps execute its requests one by one, and end those that raise on their own. A
        failure of the accelerator is not attributed to a request, so it ends all requests of the batch.

        Raises:
            EngineDeadError: the accelerator has failed several times in a row, or a rank is lost.
        """
        ended = self._take_ready()
        if not self.scheduler.has_unfinished_requests:
            return ended
        watch = self.step_watch()
        batch = self._isolation.next_batch() or self.scheduler.schedule()
        if not batch.requests:
            watch.failed()
            self._wait_for_work(batch)
            return ended
        watch.scheduled(batch)
        try:
            sampled = self._executor.execute(batch)
        except Exception as error:
            watch.failed()
            return ended + self._handle_failure(batch, error)
        return ended + self._update(batch, sampled, watch)

    def settle(self) -> list[EngineCoreOutput]:
        """Wait for the batches in flight and return their outputs. Call it before anything but a step."""
        return []

    def stats(self) -> SchedulerStats:
        """Return the state of requests and KV cache."""
        stats = self.scheduler.stats()
        stats.num_waiting_reqs += self._num_before_scheduler
        stats.images = self.images.stats()
        return stats

    def take_step_stats(self) -> StepStats | None:
        """Return the statistics of the last step; None if it failed or they were already returned."""
        stats, self._step_stats = self._step_stats, None
        return stats

    def take_lora_digests(self) -> list[str] | None:
        """Return the digests of the loaded adapters, sorted; None if they are unchanged since the last call."""
        return self._adapters.pop_changed_digests()

    def reset_prefix_cache(self) -> bool:
        """Forget the blocks of earlier requests, in the KV cache and in offload storage.

        Returns False and does nothing while the cache is in use.
        """
        return self.scheduler.reset_prefix_cache()

    def forget_blocks(self) -> bool:
        """Forget the blocks of earlier requests as ``reset_prefix_cache`` does, but keep offloaded blocks."""
        return self.scheduler.forget_blocks()

    def check_invariants(self) -> None:
        """Verify the engine's bookkeeping. Called whenever the core is idle."""
        self.scheduler.check_invariants()

    def _make_request(self, message: EngineCoreRequest, images: tuple[ImageSpan, ...] = ()) -> Request:
        check_task(message, (GENERATE,))
        self._adapters.check(message.lora_request)
        params, prompt = check_served(message), prompt_of(message)
        check_params(params, len(prompt), self._vocab_size, self._eos_token_ids)
        if not prompt:
            raise ValidationError("prompt_token_ids is empty")
        check_prompt_embeds(message, self._embeds_hidden_size)
        max_model_len = self.scheduler.max_model_len
        check_prompt_length(len(prompt), max_model_len)
        delivered = message.output_token_ids or []
        check_in_vocabulary("prompt_token_ids", prompt, self._vocab_size)
        check_in_vocabulary("output_token_ids", delivered, self._vocab_size)
        check_in_vocabulary("draft_token_ids", message.draft_token_ids or [], self._vocab_size)
        request = Request(
            message.request_id,
            prompt,
            params,
            max_model_len=max_model_len,
            eos_token_ids=self._eos_token_ids,
            output_token_ids=delivered,
            priority=message.priority,
            extra_keys=extra_keys_of(message),
            prompt_embeds=message.prompt_embeds,
            lora_request=message.lora_request,
            prediction=message.draft_token_ids,
            images=images,
        )
        if params.extra_args is not None:
            processed = ProcessedRequest(request.prompt_token_ids, self._vocab_size, self._eos_token_ids)
            request.processors = self._processors.choose(params, processed)
        return request

    def _admit(self, request: Request) -> None:
        """Pass a request whose grammar is ready to the scheduler, or queue it for its adapter."""
        if request.lora_request is None or self._adapters.add(request):
            self.scheduler.add_request(request)

    def _take_ready(self) -> list[EngineCoreOutput]:
        """Admit requests whose images, grammars and adapters are ready; return the outputs of requests that end."""
        ended: list[EngineCoreOutput] = []
        if not self.scheduler.has_unfinished_requests:
            self._wait_for_threads()
        self._take_images(ended)
        self._take_grammars(ended)
        if self._adapters or self._adapters.is_loading:
            for request, error in self._adapters.pop_ready():
                if error is None:
                    self.scheduler.add_request(request)
                else:
                    ended.append(_failed(request.request_id, error))
        return ended

    def _wait_for_threads(self) -> None:
        """Wait at most ``WORK_WAIT_S`` for a grammar, an adapter or images. Called when nothing can be computed."""
        if self._grammars:
            self._grammars.wait(WORK_WAIT_S)
        elif self._adapters.is_loading:
            self._adapters.wait(WORK_WAIT_S)
        elif self.images:
            self.images.wait(WORK_WAIT_S)

    def _take_images(self, ended: list[EngineCoreOutput]) -> None:
        for message, spans, error in self.images.pop_ready() if self.images else ():
            if error is not None:
                ended.append(_failed(message.request_id, error))
            elif end := self._enter(message, spans):
                ended.append(end)

    def _take_grammars(self, ended: list[EngineCoreOutput]) -> None:
        for request, error in self._grammars.pop_ready() if self._grammars else ():
            if error is not None:
                ended.append(_failed(request.request_id, error))
            elif stop := check_stop(request):  # all of its tokens have been delivered
                ended.append(
                    EngineCoreOutput(request.request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
                )
                request.move_to(STATUS_OF_REASON[stop.reason])
            else:
                self._admit(request)

    def _wait_for_work(self, empty: SchedulerOutput) -> None:
        """Undo an empty batch and wait, because all requests of the scheduler wait for the work of other threads."""
        self.scheduler.undo_schedule(empty)
        self.scheduler.wait(WORK_WAIT_S)

    def _update(self, batch: SchedulerOutput, sampled: SampledTokens, watch: StepWatch) -> list[EngineCoreOutput]:
        """Finish a successful step: update the requests and return their outputs."""
        watch.executed()
        self._num_accelerator_failures = 0
        outputs = self.scheduler.update_from_output(batch, sampled)
        self._step_stats = watch.updated()
        return outputs

    def _handle_failure(self, batch: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        self._dump.write(batch, error, self.scheduler, self.device_memory_bytes)
        if isinstance(error, EngineDeadError):
            raise error  # a rank is lost
        if isinstance(error, AcceleratorError):
            self._num_accelerator_failures += 1
            if self._num_accelerator_failures >= MAX_ACCELERATOR_FAILURES:
                raise EngineDeadError(f"the accelerator failed {MAX_ACCELERATOR_FAILURES} steps in a row") from error
        elif len(batch.requests) > 1:
            self._isolation.isolate(batch)
            return []
        if isinstance(error, ProcessorFailedError):
            return self.scheduler.fail_batch(batch, RequestError(PROCESSOR_FAILED, str(error)))
        message = f"the engine failed in a step with this request: {type(error).__name__}"
        return self.scheduler.fail_batch(batch, RequestError(STEP_FAILED, message, retryable=True))


def _failed(request_id: str, error: RequestError) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error)


class StepWatch:
    """A timer that starts when it is created. Its methods mark the ends of the parts of a step, in order."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._cpu_began_s = time.thread_time()
        self._batch = SchedulerOutput()
        self._paused_at = (0.0, 0.0)

    def scheduled(self, batch: SchedulerOutput) -> None:
        self._times.append(time.perf_counter())
        self._batch = batch

    def executed(self) -> None:
        self._times.append(time.perf_counter())

    def pause(self) -> None:
        """Stop the clock until ``resume``."""
        self._paused_at = time.perf_counter(), time.thread_time()

    def resume(self) -> None:
        """Continue to time the step."""
        paused_at, cpu_paused_at_s = self._paused_at
        gap = time.perf_counter() - paused_at
        self._times = [time_s + gap for time_s in self._times]
        self._cpu_began_s += time.thread_time() - cpu_paused_at_s

    def failed(self) -> None:
        """End the timing of a step that has raised or had nothing to compute. Overridden by profilers."""

    def updated(self) -> StepStats:
        """Return the statistics of the step."""
        started, scheduled, executed = self._times
        prefills = [num_tokens for num_tokens in self._batch.num_known_tokens() if num_tokens > 1]
        num_context_tokens, num_prefill_pairs = self._count_context()
        return StepStats(
            num_reqs=len(self._batch.requests),
            num_prefill_reqs=len(prefills),
            num_prefill_tokens=sum(prefills),
            num_decode_tokens=sum(self._batch.num_new_tokens) - sum(prefills),
            schedule_time_s=scheduled - started,
            execute_time_s=executed - scheduled,
            update_time_s=time.perf_counter() - executed,
            num_context_tokens=num_context_tokens,
            num_prefill_pairs=num_prefill_pairs,
            cpu_time_s=time.thread_time() - self._cpu_began_s,
        )

    def _count_context(self) -> tuple[int, int]:
        """Count the tokens that decoding requests attended to, and the token pairs of prefilling ones.

        The counts of computed tokens already include this step.
        """
        num_context_tokens = num_pairs = 0
        work = zip(self._batch.requests, self._batch.num_known_tokens(), strict=True)
        for request, num_new_tokens in work:
            if num_new_tokens == 1:
                num_context_tokens += request.num_computed_tokens
            else:
                num_pairs += num_new_tokens * max(0, request.num_computed_tokens - num_new_tokens // 2)
        return num_context_tokens, num_pairs
