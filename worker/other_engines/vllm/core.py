"""vLLM's engine core as a ``Core``: vLLM's scheduler and model with our requests and outputs.

No state of a request outlives a core. Delivered tokens are appended to the prompt, and a grammar is advanced over them
before its request is scheduled. A batch that raises ends the process, because vLLM's state is undefined afterwards. The
request that causes it is found by counting deaths, as for crashes (ops/decisions/blame.md).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from ....shared.errors import ValidationError
from ....shared.messages.core import EngineCoreEventType, EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import RepetitionDetectionParams, SamplingParams
from ....shared.stats import StepStats
from ...engine.scheduling.admission import Adapters, NoAdapters
from ...engine.scheduling.request import Request, RequestStatus
from ...engine.scheduling.stop import REPETITION_DETECTED, check_stop, ends_in_repetition
from ...request_checks import check_served, refusal
from ..checked_request import checked_request
from .conversion import check_request, events_of, finish_reason_of, logprobs_of, step_stats_of
from .vllm_request import VllmRequests

# Pause of a step while all requests wait for grammars; after it, messages of the worker process are read.
IDLE_WAIT_S = 0.005
STEP_FAILED = "engine_step_failed"

log = structlog.get_logger(__name__)


@dataclass
class _Running:
    """A request that vLLM runs. In ``request``, delivered tokens count as output."""

    request: Request
    grammar: Future[Any] | None


class VllmCore:
    """Core that checks requests with ``requests``, by vLLM's own checks, and runs the steps of ``engine``.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``.
        adapters: library of an engine that serves adapters.
        is_on_gpu: whether device memory is reported.
    """

    def __init__(
        self,
        engine: Any,
        requests: VllmRequests,
        *,
        max_model_len: int,
        eos_token_ids: list[int],
        adapters: Adapters | None,
        is_on_gpu: bool,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._adapters = NoAdapters() if adapters is None else adapters
        self._has_adapters = adapters is not None
        # Messages of requests that wait for their adapters.
        self._waiting: dict[str, EngineCoreRequest] = {}
        self._max_model_len = max_model_len
        self._vocab_size = requests.vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._is_on_gpu = is_on_gpu
        self._running: dict[str, _Running] = {}
        self._stats = SchedulerStats()
        self._step_stats: StepStats | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._has_steps

    @property
    def _has_steps(self) -> bool:
        return bool(self._engine.scheduler.has_requests() or self._engine.batch_queue)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def device_memory_bytes(self) -> int:
        if not self._is_on_gpu:
            return 0
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Implement ``Core``; a request that vLLM refuses gets vLLM's message."""
        request_id = message.request_id
        if request_id in self._running or request_id in self._waiting:
            log.warning("request_already_here", request_id=request_id)
            return None
        try:
            request = self._checked_message(message)
            stop = check_stop(request)
            if stop is not None:
                return EngineCoreOutput(request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
            if request.lora_request is not None and not self._adapters.add(request):
                self._waiting[request_id] = message
                return None
            return self._start(message, request)
        except ValidationError as error:
            return refusal(request_id, error)

    def _start(self, message: EngineCoreRequest, request: Request) -> EngineCoreOutput | None:
        """Give a request with its adapter to vLLM; return its final output if vLLM refuses it."""
        try:
            vllm_request, grammar = self._requests.make_theirs(message, request)
        except ValidationError as error:
            self._release(request)
            return refusal(request.request_id, error)
        self._running[request.request_id] = _Running(request, grammar)
        self._engine.add_request(vllm_request)
        return None

    def _release(self, request: Request) -> None:
        """Give back the adapter of a request that has ended."""
        request.move_to(RequestStatus.FINISHED_ABORTED)
        self._adapters.release_slot(request)

    def _start_ready(self) -> list[EngineCoreOutput]:
        """Start requests whose adapters are loaded; return the outputs of those that end."""
        if not self._has_steps:
            self._adapters.wait(IDLE_WAIT_S)
        ended: list[EngineCoreOutput] = []
        for request, error in self._adapters.pop_ready():
            message = self._waiting.pop(request.request_id)
            if error is not None:
                ended.append(EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            elif refused := self._start(message, request):
                ended.append(refused)
        return ended

    def abort_requests(self, request_ids: list[str]) -> None:
        """Implement ``Core``."""
        self._adapters.abort(request_ids)
        ended = [(request_id, self._running.pop(request_id, None)) for request_id in request_ids]
        for request_id, running in ended:
            self._waiting.pop(request_id, None)
            if running is not None:
                self._engine.abort_requests([request_id])
                self._release(running.request)

    def step_fn(self) -> list[EngineCoreOutput]:
        """Run one step of vLLM, which may be one batch ahead. An exception of it ends the process."""
        outputs = self._start_ready() if self._waiting or self._adapters.is_loading else []
        if not self._has_steps:
            return outputs
        started = time.perf_counter()
        groups, has_executed = self._engine.step_fn()
        self._engine.post_step(has_executed)
        step_time_s = time.perf_counter() - started
        for group in (groups or {}).values():
            outputs += [output for theirs in group.outputs if (output := self._our_output(theirs)) is not None]
            self._record_stats(group.scheduler_stats, step_time_s)
        if not has_executed and self._running and not self._engine.batch_queue:
            time.sleep(IDLE_WAIT_S)
        self._stats.step_counter += 1
        return outputs

    def settle(self) -> list[EngineCoreOutput]:
        """Finish the batches in flight if no request is left."""
        outputs: list[EngineCoreOutput] = []
        while self._has_steps and not self._running:
            outputs += self.step_fn()
        return outputs

    def stats(self) -> SchedulerStats:
        """Implement ``Core``."""
        scheduler, stats = self._engine.scheduler, self._stats
        num_running, num_waiting = scheduler.get_request_counts()
        stats.num_running_reqs, stats.num_waiting_reqs = num_running, num_waiting + len(self._waiting)
        stats.kv_cache_usage = scheduler.get_kv_cache_usage()
        return stats

    def take_step_stats(self) -> StepStats | None:
        """Implement ``Core``."""
        stats, self._step_stats = self._step_stats, None
        return stats

    def forget_warm_up(self) -> None:
        """Reset the statistics and the cache after the warm-up."""
        self._engine.reset_prefix_cache()
        self._stats, self._step_stats = SchedulerStats(), None

    def take_lora_digests(self) -> list[str] | None:
        """Implement ``Core``."""
        return self._adapters.pop_changed_digests()

    def prepare_more(self) -> bool:
        """Return False, since the engine prepares its steps itself."""
        return False

    def check_invariants(self) -> None:
        """Check nothing, since vLLM checks its state itself."""

    def _checked_message(self, message: EngineCoreRequest) -> Request:
        self._adapters.check(message.lora_request)
        params = check_served(message)
        check_request(message, params, has_adapters=self._has_adapters)
        return checked_request(
            message,
            params,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    def _our_output(self, theirs: Any) -> EngineCoreOutput | None:
        """Convert an output of vLLM; None for a request that was aborted meanwhile."""
        running = self._running.get(theirs.request_id)
        if running is None:
            return None
        params = running.request.params
        output = EngineCoreOutput(theirs.request_id, new_token_ids=list(theirs.new_token_ids))
        output.finish_reason = finish_reason_of(theirs.finish_reason)
        output.stop_reason = self._stop_reason(params, theirs.stop_reason)
        if params.logprobs is not None:
            output.new_logprobs = logprobs_of(theirs.new_logprobs, params.logprobs)
        if params.prompt_logprobs is not None:
            output.new_prompt_logprobs = logprobs_of(theirs.new_prompt_logprobs_tensors, params.prompt_logprobs)
        if theirs.prefill_stats is not None:
            # To vLLM, delivered tokens are a part of the prompt.
            cached = theirs.prefill_stats.num_cached_tokens
            output.num_cached_tokens = min(cached, running.request.num_prompt_tokens)
        output.events = events_of(theirs.events)
        self._stats.num_preemptions += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
        if params.repetition_detection is not None:
            self._end_at_repetition(running.request, params.repetition_detection, output)
        if output.finish_reason is FinishReason.ERROR:
            output.error = _error_of(running.grammar)
        self._stats.num_generation_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._running[theirs.request_id]
            self._release(running.request)
        return output

    def _end_at_repetition(self, request: Request, params: RepetitionDetectionParams, output: EngineCoreOutput) -> None:
        """End a request at the token that completes a repetition. vLLM would ignore delivered tokens."""
        for number, token_id in enumerate(output.new_token_ids, start=1):
            request.token_ids.append(token_id)
            is_last = number == len(output.new_token_ids)
            if request.num_output_tokens < request.params.min_tokens or (is_last and output.finish_reason is not None):
                continue
            if ends_in_repetition(request.token_ids, request.num_prompt_tokens, params):
                if output.finish_reason is None:
                    self._engine.abort_requests([request.request_id])
                del output.new_token_ids[number:], output.new_logprobs[number:]
                output.finish_reason, output.stop_reason = FinishReason.REPETITION, REPETITION_DETECTED
                return

    def _stop_reason(self, params: SamplingParams, reason: int | str | None) -> int | str | None:
        """Return the stop reason, without end-of-sequence tokens that the request does not name.

        vLLM treats only the first end-of-sequence token so.
        """
        if reason in self._eos_token_ids and reason not in (params.stop_token_ids or ()):
            return None
        return reason

    def _record_stats(self, theirs: Any, step_time_s: float) -> None:
        if theirs is None:
            return
        self._stats.prefix_cache_queries += theirs.prefix_cache_stats.queries
        self._stats.prefix_cache_hits += theirs.prefix_cache_stats.hits
        step_stats = step_stats_of(theirs.iteration_details, step_time_s)
        if step_stats is not None:
            self._step_stats = step_stats


def _error_of(grammar: Future[Any] | None) -> RequestError:
    """Return the error of a request that vLLM has ended; vLLM itself only logs it."""
    error = grammar.exception() if grammar is not None and grammar.done() else None
    if error is None:
        return RequestError(STEP_FAILED, "vLLM ended the request with an error; see its log", retryable=True)
    return RequestError(ValidationError.code, f"structured_outputs: vLLM cannot use the grammar: {error}")
