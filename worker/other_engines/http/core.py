"""A server behind HTTP as a ``Core``: its tokens, and everything about their end that it may not know.

A step takes what has come of the streams of all requests. When a request ends is decided here (``scheduling/stop.py``):
stop tokens, lengths and repetitions count what was delivered, of which the server knows nothing.

An answer of 400 is the request's own mistake. Anything else that goes wrong ends the process, as a batch that raises
does in other engines: who is to blame is found by deaths (decision 0014).
"""

from __future__ import annotations

import time
from typing import NoReturn

import msgspec
import structlog

from ....shared.errors import EngineDeadError, ValidationError
from ....shared.messages.from_core import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.stats.engine import StepStats
from ...engine.scheduling.request import Request
from ...engine.scheduling.stop import check_stop, take_tokens
from ...request_checks import check_adapter, check_served, refusal
from ..checked_request import checked_request
from .dialect import Chunk, Dialect
from .plan import OtherTokensError, Running
from .streams import Answer, Event, Refused, ServerStreams

# A step waits so long for the first event; then messages are looked at again.
STEP_WAIT_S = 0.01
# A server that has requests and says nothing of any for so long hangs: the longest prompts take less.
MAX_SILENCE_S = 300.0
OTHER_TOKENS = "other_tokens"
_CALLERS_MISTAKES = frozenset({400, 413, 422})
_MAX_WORDS = 500

log = structlog.get_logger(__name__)


class HttpCore:
    """Requests become calls in ``dialect``'s words, made by ``streams``.

    Args:
        vocab_size, eos_token_ids: of the model, as its folder says.
        kv_cache_size_tokens: what the server has for all requests.
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
        self._heard_s = 0.0
        self._stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._running)

    @property
    def device_memory_bytes(self) -> int:
        """The server's own business."""
        return 0

    def add_request(self, message: EngineCoreRequest) -> EngineCoreOutput | None:
        """As ``Core``; what the dialect has no words for is refused by name."""
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
            self._heard_s = time.monotonic()
        now = time.monotonic()
        request.events = [
            EngineCoreEvent(EngineCoreEventType.QUEUED, now),
            EngineCoreEvent(EngineCoreEventType.SCHEDULED, now),
        ]
        self._running[request_id] = Running(request)
        self._ask(self._running[request_id])
        return None

    def abort_requests(self, request_ids: list[str]) -> None:
        """As ``Core``; the connection is closed."""
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                self._leave_call(running)

    def step_fn(self) -> list[EngineCoreOutput]:
        """What has come since the last step, one output for each request.

        Raises:
            EngineDeadError: the server is gone, fails, or says nothing any more.
        """
        outputs: dict[str, EngineCoreOutput] = {}
        events = self._streams.take(STEP_WAIT_S)
        for event in events:
            running = self._by_call.get(event.call_id)
            if running is not None:
                self._heard_s = time.monotonic()
                request_id = running.request.request_id
                output = outputs.setdefault(request_id, EngineCoreOutput(request_id))
                self._apply(event, running, output)
        if self._running and time.monotonic() - self._heard_s > MAX_SILENCE_S:
            self._die(f"it has said nothing for {MAX_SILENCE_S:g} s of the {len(self._running)} requests that it has")
        self._stats.step_counter += 1
        return [output for output in outputs.values() if output.new_token_ids or output.finished]

    def settle(self) -> list[EngineCoreOutput]:
        """Nothing of a step is ever left."""
        return []

    def stats(self) -> SchedulerStats:
        """As ``Core``."""
        num_tokens = sum(running.request.num_tokens for running in self._running.values())
        self._stats.num_running_reqs = len(self._running)
        self._stats.kv_cache_usage = min(1.0, num_tokens / self._kv_cache_size_tokens)
        return self._stats

    def take_step_stats(self) -> StepStats | None:
        """Nothing is known of the server's steps."""
        return None

    def take_lora_digests(self) -> list[str] | None:
        """It serves no adapters."""
        return None

    def check_invariants(self) -> None:
        """Without requests there are no calls.

        Raises:
            EngineDeadError: there are.
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

    def _ask(self, running: Running) -> None:
        self._leave_call(running)
        asked = running.plan()
        body = self._dialect.body(asked)
        running.call_id = self._streams.ask(self._dialect.generate_path, body, is_streamed=asked.is_streamed)
        self._by_call[running.call_id] = running

    def _leave_call(self, running: Running) -> None:
        if self._by_call.pop(running.call_id, None) is not None:
            self._streams.cancel(running.call_id)

    def _apply(self, event: Event, running: Running, output: EngineCoreOutput) -> None:
        if isinstance(event, Answer):
            assert running.asked is not None
            try:
                chunk = self._dialect.read(event.content, running.asked, running.num_seen)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                self._die(f"its answer cannot be read: {type(error).__name__} {error}")
            self._take(chunk, running, output)
        elif isinstance(event, Refused):
            words = _words(event.content)
            if event.status not in _CALLERS_MISTAKES:
                self._die(f"it answered {event.status}: {words}")
            self._refuse(running, words, output)
        else:
            self._die(event.failure or "it ended its answer in the middle")

    def _take(self, chunk: Chunk, running: Running, output: EngineCoreOutput) -> None:
        if chunk.failure:
            self._die(chunk.failure)
        if running.num_calls == 1:
            running.num_cached_tokens = max(running.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.refusal:
            self._refuse(running, chunk.refusal, output)
            return
        if chunk.num_generated > running.num_seen + len(chunk.token_ids):
            if not running.is_streamed:
                self._die("tokens are missing in its answer")
            # There are characters that its stream leaves out the tokens of; it does so again, sooner or later.
            running.is_streamed = False
            self._ask(running)
            return
        try:
            token_ids = running.take_new(chunk.token_ids)
        except OtherTokensError:
            self._end_differing(running, output)
            return
        self._deliver(chunk, token_ids, running, output)

    def _deliver(self, chunk: Chunk, token_ids: list[int], running: Running, output: EngineCoreOutput) -> None:
        """Tell tokens that are new, and the end if they are the last."""
        request = running.request
        logprobs = chunk.logprobs[len(chunk.logprobs) - len(token_ids) :] if chunk.logprobs else []
        stop = take_tokens(request, token_ids)
        output.new_token_ids += token_ids
        output.new_logprobs += logprobs[: len(token_ids)]
        output.events += request.take_events()
        # To the server what was delivered is prompt, too.
        output.num_cached_tokens = min(running.num_cached_tokens, request.num_prompt_tokens)
        self._stats.num_generation_tokens += len(token_ids)
        if stop is not None:
            self._end(running, output, stop.reason, stop.stop_reason)
        elif chunk.ending is FinishReason.LENGTH and running.is_piece:
            if not token_ids:
                self._die("it ended a call without a token")
            self._ask(running)
        elif chunk.ending is not None:
            is_named = chunk.stop_reason in request.stop_token_ids
            self._end(running, output, chunk.ending, chunk.stop_reason if is_named else None)

    def _refuse(self, running: Running, words: str, output: EngineCoreOutput) -> None:
        error = ValidationError(f"{self._dialect.name} refuses the request: {words[:_MAX_WORDS]}")
        output.error = RequestError(error.code, str(error))
        self._end(running, output, FinishReason.ERROR)

    def _end_differing(self, running: Running, output: EngineCoreOutput) -> None:
        output.error = RequestError(
            OTHER_TOKENS,
            f"{self._dialect.name} begins a grammar with its first token, and made other tokens than those that were "
            "delivered before its death; ask again",
            retryable=True,
        )
        self._end(running, output, FinishReason.ERROR)

    def _end(
        self, running: Running, output: EngineCoreOutput, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        output.finish_reason, output.stop_reason = reason, stop_reason
        del self._running[running.request.request_id]
        self._leave_call(running)

    def _die(self, words: str) -> NoReturn:
        raise EngineDeadError(f"{self._dialect.name}: {words[:_MAX_WORDS]}")


def _words(content: bytes) -> str:
    """What an answer says is wrong: the message in it, or all of it."""
    try:
        told = msgspec.json.decode(content)
    except msgspec.DecodeError:
        told = None
    error = told.get("error", told) if isinstance(told, dict) else told
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or content.decode(errors="replace")).strip() or "it gave no reason"
