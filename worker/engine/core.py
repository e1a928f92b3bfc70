"""The engine core: everything between a request and its tokens, without process, socket or clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from ...shared.errors import EngineDeadError, ValidationError
from ...shared.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError, SchedulerStats
from ...shared.params import GENERATE
from ...shared.stats import StepStats
from ..request_checks import check_prompt_length, check_served, check_task, refusal
from .dump import StepDump
from .executor import AcceleratorError, Executor
from .logits_processors import PROCESSOR_FAILED, LogitsProcessors, ProcessedRequest, ProcessorFailedError
from .sampling.param_checks import check_in_vocabulary, check_params
from .scheduling.grammars import Grammars, NoGrammars
from .scheduling.isolation import Isolation
from .scheduling.prompt_embeds import check_prompt_embeds, extra_keys_of, prompt_of
from .scheduling.request import STATUS_OF_REASON, Request, RequestStatus
from .scheduling.scheduler import Scheduler
from .scheduling.scheduler_output import SampledTokens, SchedulerOutput
from .scheduling.stop import check_stop
from .step_watch import StepWatch

STEP_FAILED = "engine_step_failed"
# An accelerator that has failed once usually fails for good; give it two more steps before the process gives up.
MAX_ACCELERATOR_FAILURES = 3
# While nothing but grammars is worked on, a step waits for them so long; then messages are looked at again.
GRAMMAR_WAIT_S = 0.01

log = structlog.get_logger(__name__)


class EngineCore:
    """One model's scheduler and executor.

    ``step`` computes one batch from beginning to end; ``look_ahead.LookAheadCore`` schedules the next one meanwhile.

    Attributes:
        step_fn: the form of ``step`` that this core is made for.
        step_watch: makes what times a step; a profiler puts its own in place.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammars: Grammars | None = None,
        dump: StepDump | None = None,
        embeds_hidden_size: int | None = None,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._dump = dump or StepDump()
        self._executor = executor
        self.step_fn = self.step
        self._grammars = NoGrammars() if grammars is None else grammars
        self._embeds_hidden_size = embeds_hidden_size
        self._processors = LogitsProcessors() if processors is None else processors
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_accelerator_failures = 0
        self._isolation = Isolation()
        self._step_stats: StepStats | None = None
        self.step_watch: Callable[[], StepWatch] = StepWatch

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests or self.num_waiting_for_grammar > 0

    @property
    def num_unfinished_requests(self) -> int:
        return self.scheduler.num_unfinished_requests + self.num_waiting_for_grammar

    @property
    def num_waiting_for_grammar(self) -> int:
        """Requests that the scheduler does not know yet."""
        return len(self._grammars)

    @property
    def device_memory_bytes(self) -> int:
        return self._executor.device_memory_bytes

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request, or return its end if it has one already: it is refused, or was complete when resumed."""
        if message.request_id in self.scheduler or message.request_id in self._grammars:
            log.warning("request_already_here", request_id=message.request_id)
            return None
        try:
            request = self._make_request(message)
            stop = check_stop(request)
            if stop is not None:
                return EngineCoreOutput(message.request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
            if request.params.structured_outputs is None:
                self.scheduler.add_request(request)
            else:
                self._grammars.add(request)
        except ValidationError as error:
            return refusal(message.request_id, error)
        return None

    def abort_requests(self, request_ids: list[str]) -> None:
        """Stop computing these, without a word; unknown and finished ones are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._grammars.abort(request_ids)

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, execute, update. Requests whose grammars have been compiled come in before.

        If a batch raises, the next steps execute its requests one by one, and those that raise alone are ended. A
        failure of the accelerator tells nothing about the requests: it ends all of the batch.

        Raises:
            EngineDeadError: the accelerator has failed several times in a row.
        """
        ended = self._take_ready_grammars()
        if not self.scheduler.has_unfinished_requests:
            return ended
        watch = self.step_watch()
        batch = self._isolation.next_batch() or self.scheduler.schedule()
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
        stats.num_waiting_reqs += self.num_waiting_for_grammar
        return stats

    def take_step_stats(self) -> StepStats | None:
        """Return what the last step did; None if it failed, or was asked for before."""
        stats, self._step_stats = self._step_stats, None
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier requests have left in the KV cache; False, and nothing is done, while it is in use."""
        return self.scheduler.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Verify the engine's bookkeeping; called whenever there is nothing else to do."""
        self.scheduler.check_invariants()

    def _make_request(self, message: EngineCoreRequest) -> Request:
        check_task(message, (GENERATE,))
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
            prediction=message.draft_token_ids,
        )
        if params.extra_args is not None:
            known = ProcessedRequest(request.prompt_token_ids, self._vocab_size, self._eos_token_ids)
            request.processors = self._processors.wanted(params, known)
        return request

    def _take_ready_grammars(self) -> list[EngineCoreOutput]:
        """Hand requests with their grammars to the scheduler; returns the ends of those that have none."""
        if not self._grammars:
            return []
        if not self.scheduler.has_unfinished_requests:
            self._grammars.wait(GRAMMAR_WAIT_S)
        ended: list[EngineCoreOutput] = []
        for request, error in self._grammars.take_ready():
            if error is not None:
                ended.append(EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            elif stop := check_stop(request):  # it had all been delivered
                ended.append(
                    EngineCoreOutput(request.request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
                )
                request.move_to(STATUS_OF_REASON[stop.reason])
            else:
                self.scheduler.add_request(request)
        return ended

    def _update(self, batch: SchedulerOutput, sampled: SampledTokens, watch: StepWatch) -> list[EngineCoreOutput]:
        """The last part of a step that succeeded."""
        watch.executed()
        self._num_accelerator_failures = 0
        outputs = self.scheduler.update_from_output(batch, sampled)
        self._step_stats = watch.updated()
        return outputs

    def _handle_failure(self, batch: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        self._dump.write(batch, error, self.scheduler, self.device_memory_bytes)
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
