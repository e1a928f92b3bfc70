"""A ``Core`` that uses an HTTP server for tokens, and decides itself when a request ends.

A step processes the events that have arrived from all streams. The end of a request is decided here
(``scheduling/stop.py``), because stop tokens, lengths and repetitions count delivered tokens too, which the server does
not know.

A response with status 400 is an error of the request. Any other failure ends the process, as a batch that raises does
in other engines; the request that causes it is found by counting deaths (ops/decisions/blame.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import structlog

from ....shared.control.calls import UtilityAnswer
from ....shared.control.engine import CheckInvariants, Invariants
from ....shared.control.model import ListLoras, LoraList
from ....shared.errors import EngineDeadError, ValidationError
from ....shared.messages.core import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.stats import StepStats
from ...core.answers import CallAnswers
from ...engine.scheduling.request import Request
from ...engine.scheduling.stop import append_tokens_until_stop, check_stop
from ...processes.progress import ProgressWriter
from ...request_checks import check_adapter, check_served, refusal
from ..checked_request import checked_request
from .dialect import Chunk, Dialect
from .plan import OtherTokensError, Running
from .streams import Answer, Event, Refused, ServerStreams

# Longest wait of a step for the first event; after it, messages of the worker process are read.
STEP_WAIT_S = 0.01
# A server that sends no event for this long while it has requests hangs: the longest prompts take less.
MAX_SILENCE_S = 300.0
OTHER_TOKENS = "other_tokens"
_CALLERS_MISTAKES = frozenset({400, 413, 422})
_MAX_MESSAGE_CHARS = 500

log = structlog.get_logger(__name__)


class HttpCore:
    """Core whose requests become calls encoded by ``dialect`` and made by ``streams``.

    Args:
        vocab_size, eos_token_ids: those of the model's folder.
        kv_cache_size_tokens: size of the server's cache for all requests.
    """

    def __init__(
        self,
        dialect: Dialect,
        streams: ServerStreams,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: list[int],
        kv_cache_size_tokens: int,
    ) -> None:
        self._dialect = dialect
        self._streams = streams
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._kv_cache_size_tokens = kv_cache_size_tokens
        self._running: dict[str, Running] = {}
        self._by_call: dict[int, Running] = {}
        self._last_event_s = 0.0
        self._stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    @property
    def device_memory_bytes(self) -> int:
        """Zero, because the server's memory is not known."""
        return 0

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """Implement ``Core``; parameters that the dialect does not support are refused by name."""
        request_id = message.request_id
        if request_id in self._running:
            log.warning("request_already_here", request_id=request_id)
            return None
        try:
            request = self._checked(message)
        except ValidationError as error:
            return refusal(request_id, error)
        stop = check_stop(request)
        if stop is not None:
            return EngineCoreOutput(request_id, finish_reason=stop.reason, stop_reason=stop.stop_reason)
        if not self._running:
            self._last_event_s = time.monotonic()
        now = time.monotonic()
        request.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, now),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, now),
        ]
        self._running[request_id] = Running(request)
        self._start_call(self._running[request_id])
        return None

    def abort_requests(self, request_ids: list[str]) -> None:
        """Implement ``Core``; closes the connections of the calls."""
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._cancel_call(running)

    def step_fn(self) -> list[EngineCoreOutput]:
        """Return the outputs since the last step, one for each request.

        Raises:
            EngineDeadError: the server has exited, fails, or sends no events any more.
        """
        outputs: dict[str, EngineCoreOutput] = {}
        events = self._streams.pop_events(STEP_WAIT_S)
        for event in events:
            running = self._by_call.get(event.call_id)
            if running is not None:
                self._last_event_s = time.monotonic()
                request_id = running.request.request_id
                output = outputs.setdefault(request_id, EngineCoreOutput(request_id))
                self._apply(event, running, output)
        if self._running and time.monotonic() - self._last_event_s > MAX_SILENCE_S:
            self._die(f"it has sent nothing for {MAX_SILENCE_S:g} s, and has {len(self._running)} requests")
        self._stats.step_counter += 1
        return [output for output in outputs.values() if output.new_token_ids or output.finished]

    def settle(self) -> list[EngineCoreOutput]:
        """Return nothing, since no step is ever pending."""
        return []

    def stats(self) -> SchedulerStats:
        """Implement ``Core``."""
        num_tokens = sum(running.request.num_tokens for running in self._running.values())
        self._stats.num_running_reqs = len(self._running)
        self._stats.kv_cache_usage = min(1.0, num_tokens / self._kv_cache_size_tokens)
        return self._stats

    def take_step_stats(self) -> StepStats | None:
        """Return None, since the server's steps are not known."""
        return None

    def take_lora_digests(self) -> list[str] | None:
        """Return None, since no adapters are served."""
        return None

    def prepare_more(self) -> bool:
        """Return False, since the engine prepares its steps itself."""
        return False

    def check_invariants(self) -> None:
        """Check that no calls are in progress without requests.

        Raises:
            EngineDeadError: calls are in progress.
        """
        if not self._running and self._by_call:
            raise EngineDeadError(f"{len(self._by_call)} calls belong to no request")

    def _checked(self, message: EngineCoreRequest) -> Request:
        check_adapter(message, has_adapters=False, engine="http")
        params = check_served(message)
        self._dialect.check(message, params)
        return checked_request(
            message,
            params,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    def _start_call(self, running: Running) -> None:
        self._cancel_call(running)
        call = running.plan()
        body = self._dialect.body(call)
        running.call_id = self._streams.start(self._dialect.generate_path, body, is_streamed=call.is_streamed)
        self._by_call[running.call_id] = running

    def _cancel_call(self, running: Running) -> None:
        if self._by_call.pop(running.call_id, None) is not None:
            self._streams.cancel(running.call_id)

    def _apply(self, event: Event, running: Running, output: EngineCoreOutput) -> None:
        if isinstance(event, Answer):
            assert running.call is not None
            try:
                chunk = self._dialect.decode(event.content, running.call, running.num_received)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                self._die(f"its response cannot be decoded: {type(error).__name__} {error}")
            self._apply_chunk(chunk, running, output)
        elif isinstance(event, Refused):
            message = _error_message(event.content)
            if event.status not in _CALLERS_MISTAKES:
                self._die(f"it responded with status {event.status}: {message}")
            self._refuse_request(running, message, output)
        else:
            self._die(event.failure or "it ended its response too early")

    def _apply_chunk(self, chunk: Chunk, running: Running, output: EngineCoreOutput) -> None:
        if chunk.failure:
            self._die(chunk.failure)
        if running.num_calls == 1:
            running.num_cached_tokens = max(running.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.refusal:
            self._refuse_request(running, chunk.refusal, output)
            return
        if chunk.num_generated > running.num_received + len(chunk.token_ids):
            if not running.is_streamed:
                self._die("tokens are missing in its response")
            # Its streams omit the tokens of some characters; use calls without streaming from now on.
            running.is_streamed = False
            self._start_call(running)
            return
        try:
            token_ids = running.add_received(chunk.token_ids)
        except OtherTokensError:
            self._end_differing(running, output)
            return
        self._deliver(chunk, token_ids, running, output)

    def _deliver(self, chunk: Chunk, token_ids: list[int], running: Running, output: EngineCoreOutput) -> None:
        """Add new tokens to ``output``, and the end of the request if they are the last."""
        request = running.request
        logprobs = chunk.logprobs[len(chunk.logprobs) - len(token_ids) :] if chunk.logprobs else []
        stop = append_tokens_until_stop(request, token_ids)
        output.new_token_ids += token_ids
        output.new_logprobs += logprobs[: len(token_ids)]
        output.events += request.pop_events()
        # To the server, delivered tokens are a part of the prompt.
        output.num_cached_tokens = min(running.num_cached_tokens, request.num_prompt_tokens)
        self._stats.num_generation_tokens += len(token_ids)
        if stop is not None:
            self._end_request(running, output, stop.reason, stop.stop_reason)
        elif chunk.ending is FinishReason.LENGTH and running.is_piece:
            if not token_ids:
                self._die("it ended a call without a token")
            self._start_call(running)
        elif chunk.ending is not None:
            is_named = chunk.stop_reason in request.stop_token_ids
            self._end_request(running, output, chunk.ending, chunk.stop_reason if is_named else None)

    def _refuse_request(self, running: Running, message: str, output: EngineCoreOutput) -> None:
        error = ValidationError(f"{self._dialect.name} refuses the request: {message[:_MAX_MESSAGE_CHARS]}")
        output.error = RequestError(error.code, str(error))
        self._end_request(running, output, FinishReason.ERROR)

    def _end_differing(self, running: Running, output: EngineCoreOutput) -> None:
        output.error = RequestError(
            OTHER_TOKENS,
            f"{self._dialect.name} applies a grammar from its first token on, and generated other tokens than those "
            "delivered before its death; send the request again",
            retryable=True,
        )
        self._end_request(running, output, FinishReason.ERROR)

    def _end_request(
        self, running: Running, output: EngineCoreOutput, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        output.finish_reason, output.stop_reason = reason, stop_reason
        del self._running[running.request.request_id]
        self._cancel_call(running)

    def _die(self, reason: str) -> NoReturn:
        raise EngineDeadError(f"{self._dialect.name}: {reason[:_MAX_MESSAGE_CHARS]}")


def _error_message(content: bytes) -> str:
    """Return the error message in a response, or the whole response."""
    try:
        response = msgspec.json.decode(content)
    except msgspec.DecodeError:
        response = None
    error = response.get("error", response) if isinstance(response, dict) else response
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or content.decode(errors="replace")).strip() or "it gave no reason"


def http_control(core: HttpCore, num_tokens: int, progress: ProgressWriter) -> CallAnswers:
    """Return the handler of calls about ``core``, whose server has a cache of ``num_tokens``."""

    def check_invariants(_: CheckInvariants) -> Invariants:
        core.check_invariants()
        num_free = round(num_tokens * (1 - core.stats().kv_cache_usage))
        return Invariants(num_free, num_tokens, core.num_unfinished_requests, 0)

    functions: dict[type, Callable[[Any], UtilityAnswer]] = {
        CheckInvariants: check_invariants,
        ListLoras: lambda _: LoraList([]),
    }
    return CallAnswers(functions, progress, lambda _: False)
