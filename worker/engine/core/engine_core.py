"""The engine core: everything between a request and its tokens, without process, socket or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from ....shared.errors import EngineDeadError, ValidationError
from ....shared.messages.from_core import EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.kinds import GENERATE
from ....shared.stats.engine import StepStats
from ...request_checks import check_prompt_length, check_served, check_task, refusal
from ..images.interface import Images, NoImages
from ..logits_processors import PROCESSOR_FAILED, LogitsProcessors, ProcessedRequest, ProcessorFailedError
from ..own_ordering import ORDERING_FAILED, Key, OrderingFailedError, nothing_to_rank
from ..sampling.param_checks import check_in_vocabulary, check_params
from ..scheduling.admission.adapters import Adapters, NoAdapters
from ..scheduling.admission.grammars import Grammars, NoGrammars
from ..scheduling.image_spans import ImageSpan
from ..scheduling.isolation import Isolation
from ..scheduling.prompt_embeds import check_prompt_embeds, extra_keys_of, prompt_of
from ..scheduling.request import STATUS_OF_REASON, Request, RequestStatus
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput
from ..scheduling.stop import check_stop
from .dump import StepDump
from .executor import AcceleratorError, Executor
from .step_watch import StepWatch

STEP_FAILED = "engine_step_failed"
# An accelerator that has failed once usually fails for good; give it two more steps before the process gives up.
MAX_ACCELERATOR_FAILURES = 3
# While requests wait for what is done beside the loop, and nothing else is to be computed, a step waits so long; then
# messages are looked at again.
WORK_WAIT_S = 0.01

log = structlog.get_logger(__name__)


class EngineCore:
    """One model's scheduler and executor.

    ``step`` computes one batch from beginning to end; ``look_ahead.LookaheadCore`` schedules the next one meanwhile.

    Attributes:
        step_fn: the form of ``step`` that this core is made for.
        step_watch: makes what times a step; a profiler puts its own in place.
        images: messages that wait for theirs, and what is kept of earlier ones.
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
        """Requests that the scheduler does not know yet: they wait for images, grammars or adapters."""
        return len(self.images) + len(self._grammars) + len(self._adapters)

    @property
    def device_memory_bytes(self) -> int:
        return self._executor.device_memory_bytes

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request, or return its end if it has one already: it is refused, or was complete when resumed."""
        places = (self.scheduler, self.images, self._grammars, self._adapters)
        if any(message.request_id in place for place in places):
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
        """``add_request`` of a message whose prompt is whole."""
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
        """Stop computing these, without a word; unknown and finished ones are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._grammars.abort(request_ids)
        self._adapters.abort(request_ids)
        self.images.abort(request_ids)

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, execute, update. Requests whose images, grammars and adapters are there come in before.

        If a batch raises, the next steps execute its requests one by one, and those that raise alone are ended. A
        failure of the accelerator tells nothing about the requests: it ends all of the batch.

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
        """Have nothing in flight, and return the outputs of what was. Before anything but a step."""
        return []

    def stats(self) -> SchedulerStats:
        """Where requests and KV cache stand."""
        stats = self.scheduler.stats()
        stats.num_waiting_reqs += self._num_before_scheduler
        stats.images = self.images.stats()
        return stats

    def take_step_stats(self) -> StepStats | None:
        """Return what the last step did; None if it failed, or was asked for before."""
        stats, self._step_stats = self._step_stats, None
        return stats

    def take_lora_digests(self) -> list[str] | None:
        """Return those of the adapters that are loaded, sorted; None if they are as they were when asked before."""
        return self._adapters.take_digests()

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier requests have left, in the KV cache and wherever its blocks are kept.

        False, and nothing is done, while the cache is in use.
        """
        return self.scheduler.reset_prefix_cache()

    def forget_blocks(self) -> bool:
        """As ``reset_prefix_cache``, of the KV cache alone: blocks that are kept elsewhere stay."""
        return self.scheduler.forget_blocks()

    def check_invariants(self) -> None:
        """Verify the engine's bookkeeping; called whenever there is nothing else to do."""
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
            known = ProcessedRequest(request.prompt_token_ids, self._vocab_size, self._eos_token_ids)
            request.processors = self._processors.wanted(params, known)
        return request

    def _admit(self, request: Request) -> None:
        """Let a request that has its grammar go on: to the scheduler, or to wait for its adapter."""
        if request.lora_request is None or self._adapters.add(request):
            self.scheduler.add_request(request)

    def _take_ready(self) -> list[EngineCoreOutput]:
        """Let requests go on whose images, grammars and adapters are there; returns the ends of those that get none."""
        ended: list[EngineCoreOutput] = []
        if not self.scheduler.has_unfinished_requests:
            self._wait_for_one()
        self._take_images(ended)
        self._take_grammars(ended)
        if self._adapters or self._adapters.is_loading:
            for request, error in self._adapters.take_ready():
                if error is None:
                    self.scheduler.add_request(request)
                else:
                    ended.append(_failed(request.request_id, error))
        return ended

    def _wait_for_one(self) -> None:
        """Nothing is to be computed: wait for what is done beside the loop, at most ``WORK_WAIT_S``."""
        if self._grammars:
            self._grammars.wait(WORK_WAIT_S)
        elif self._adapters.is_loading:
            self._adapters.wait(WORK_WAIT_S)
        elif self.images:
            self.images.wait(WORK_WAIT_S)

    def _take_images(self, ended: list[EngineCoreOutput]) -> None:
        for message, spans, error in self.images.take_ready() if self.images else ():
            if error is not None:
                ended.append(_failed(message.request_id, error))
            elif end := self._enter(message, spans):
                ended.append(end)

    def _take_grammars(self, ended: list[EngineCoreOutput]) -> None:
        for request, error in self._grammars.take_ready() if self._grammars else ():
            if error is not None:
                ended.append(_failed(request.request_id, error))
            elif stop := check_stop(request):  # it had all been delivered
                ended.append(
                    EngineCoreOutput(request.request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
                )
                request.move_to(STATUS_OF_REASON[stop.reason])
            else:
                self._admit(request)

    def _wait_for_work(self, empty: SchedulerOutput) -> None:
        """Nothing can be computed yet: all requests wait for something that is done beside the loop."""
        self.scheduler.take_back(empty)
        self.scheduler.wait(WORK_WAIT_S)

    def _update(self, batch: SchedulerOutput, sampled: SampledTokens, watch: StepWatch) -> list[EngineCoreOutput]:
        """The last part of a step that succeeded."""
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
