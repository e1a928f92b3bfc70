"""vLLM's engine core as a ``Core``: its scheduler and its model, our requests and outputs.

Nothing of a request outlives a core: what was delivered comes back as the end of the prompt, and a grammar is led over
it before its request is scheduled. A batch that raises ends the process, for vLLM's
state is not to be trusted afterwards: who is to blame is found by deaths, as for crashes (decision 0014).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from ....shared.errors import ValidationError
from ....shared.messages.from_core import EngineCoreEventType, EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.repetition import RepetitionDetectionParams
from ....shared.params.sampling import SamplingParams
from ....shared.stats.engine import StepStats
from ...engine.scheduling.repetition import ends_in_repetition
from ...engine.scheduling.request import Request
from ...engine.scheduling.stop import REPETITION_DETECTED, check_stop
from ...request_checks import check_adapter, check_served, refusal
from ..checked_request import checked_request
from .outputs import events_of, finish_reason_of, logprobs_of, step_stats_of
from .params import check_request
from .vllm_request import VllmRequests

# While all that there is waits for grammars, a step waits so long; then messages are looked at again.
IDLE_WAIT_S = 0.005
STEP_FAILED = "engine_step_failed"

log = structlog.get_logger(__name__)


@dataclass
class _Running:
    """What is known here of a request that vLLM has. ``request`` counts what was delivered as output."""

    request: Request
    grammar: Future[Any] | None


class VllmCore:
    """Requests go through ``requests``, vLLM's own checks; steps are ``engine``'s.

    Args:
        engine: ``vllm.v1.engine.core.EngineCore``.
        is_on_gpu: whether there is device memory to tell of.
    """

    def __init__(
        self, engine: Any, requests: VllmRequests, *, max_model_len: int, eos_token_ids: list[int], is_on_gpu: bool
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._max_model_len = max_model_len
        self._vocab_size = requests.vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._is_on_gpu = is_on_gpu
        self._running: dict[str, _Running] = {}
        self._stats = SchedulerStats()
        self._step_stats: StepStats | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._engine.scheduler.has_requests() or self._engine.batch_queue)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    @property
    def device_memory_bytes(self) -> int:
        if not self._is_on_gpu:
            return 0
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """As ``Core``; what vLLM refuses is refused in its words."""
        request_id = message.request_id
        if request_id in self._running:
            log.warning("request_already_here", request_id=request_id)
            return None
        try:
            request = self._checked(message)
            stop = check_stop(request)
            if stop is not None:
                return EngineCoreOutput(request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
            vllm_request, grammar = self._requests.make(message, request)
        except ValidationError as error:
            return refusal(request_id, error)
        self._running[request_id] = _Running(request, grammar)
        self._engine.add_request(vllm_request)
        return None

    def abort_requests(self, request_ids: list[str]) -> None:
        """As ``Core``."""
        known = [request_id for request_id in request_ids if self._running.pop(request_id, None) is not None]
        if known:
            self._engine.abort_requests(known)

    def step_fn(self) -> list[EngineCoreOutput]:
        """One step of vLLM's, which may be one batch ahead; whatever it raises ends the process."""
        started = time.perf_counter()
        groups, has_executed = self._engine.step_fn()
        self._engine.post_step(has_executed)
        step_time_s = time.perf_counter() - started
        told: list[EngineCoreOutput] = []
        for group in (groups or {}).values():
            told += [output for theirs in group.outputs if (output := self._tell(theirs)) is not None]
            self._note(group.scheduler_stats, step_time_s)
        if not has_executed and self._running and not self._engine.batch_queue:
            time.sleep(IDLE_WAIT_S)
        self._stats.step_counter += 1
        return told

    def settle(self) -> list[EngineCoreOutput]:
        """Land what is in flight, if no request is left that a step would go on with."""
        told: list[EngineCoreOutput] = []
        while self.has_work and not self._running:
            told += self.step_fn()
        return told

    def stats(self) -> SchedulerStats:
        """As ``Core``."""
        scheduler, stats = self._engine.scheduler, self._stats
        num_running, num_waiting = scheduler.get_request_counts()
        stats.num_running_reqs, stats.num_waiting_reqs = num_running, num_waiting
        stats.kv_cache_usage = scheduler.get_kv_cache_usage()
        return stats

    def take_step_stats(self) -> StepStats | None:
        """As ``Core``."""
        stats, self._step_stats = self._step_stats, None
        return stats

    def forget_warm_up(self) -> None:
        """Begin to count, with an empty cache."""
        self._engine.reset_prefix_cache()
        self._stats, self._step_stats = SchedulerStats(), None

    def take_lora_digests(self) -> list[str] | None:
        """It serves no adapters."""
        return None

    def check_invariants(self) -> None:
        """vLLM verifies itself as it goes."""

    def _checked(self, message: EngineCoreRequest) -> Request:
        check_adapter(message, has_adapters=False, engine="vllm")
        params = check_served(message)
        check_request(message, params)
        return checked_request(
            message,
            params,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    def _tell(self, theirs: Any) -> EngineCoreOutput | None:
        """Our output of one of theirs; None for a request that was aborted meanwhile."""
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
            # To vLLM what was delivered is prompt, too.
            cached = theirs.prefill_stats.num_cached_tokens
            output.num_cached_tokens = min(cached, running.request.num_prompt_tokens)
        output.events = events_of(theirs.events)
        self._stats.num_preemptions += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
        if params.repetition_detection is not None:
            self._seek_repetition(running.request, params.repetition_detection, output)
        if output.finish_reason is FinishReason.ERROR:
            output.error = _error_of(running.grammar)
        self._stats.num_generation_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._running[theirs.request_id]
        return output

    def _seek_repetition(self, request: Request, sought: RepetitionDetectionParams, output: EngineCoreOutput) -> None:
        """End a request at the token that makes it repeat itself, which vLLM would seek in its own output alone."""
        for number, token_id in enumerate(output.new_token_ids, start=1):
            request.token_ids.append(token_id)
            is_last = number == len(output.new_token_ids)
            if request.num_output_tokens < request.params.min_tokens or (is_last and output.finish_reason is not None):
                continue
            if ends_in_repetition(request.token_ids, request.num_prompt_tokens, sought):
                if output.finish_reason is None:
                    self._engine.abort_requests([request.request_id])
                del output.new_token_ids[number:], output.new_logprobs[number:]
                output.finish_reason, output.stop_reason = FinishReason.REPETITION, REPETITION_DETECTED
                return

    def _stop_reason(self, params: SamplingParams, reason: int | str | None) -> int | str | None:
        """An end-of-sequence token is no stop reason, unless the request names it; to vLLM only the first is one."""
        if reason in self._eos_token_ids and reason not in (params.stop_token_ids or ()):
            return None
        return reason

    def _note(self, theirs: Any, step_time_s: float) -> None:
        if theirs is None:
            return
        self._stats.prefix_cache_queries += theirs.prefix_cache_stats.queries
        self._stats.prefix_cache_hits += theirs.prefix_cache_stats.hits
        step_stats = step_stats_of(theirs.iteration_details, step_time_s)
        if step_stats is not None:
            self._step_stats = step_stats


def _error_of(grammar: Future[Any] | None) -> RequestError:
    """Why vLLM has ended a request with an error; it tells the log alone."""
    error = grammar.exception() if grammar is not None and grammar.done() else None
    if error is None:
        return RequestError(STEP_FAILED, "vLLM ended the request with an error, which its log tells", retryable=True)
    return RequestError(ValidationError.code, f"structured_outputs: vLLM cannot use the grammar: {error}")
