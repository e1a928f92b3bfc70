"""Spans of a request at an engine: time in the queue, the attempt, and in it prefill and decode.

    enqueue ─┬─ queue      from its arrival, or from its return to the queue, to the claim
             ├─ attempt    from the claim to its end here; links to the previous attempt
             │   ├─ prefill    from when it was first scheduled to its first token here
             │   └─ decode     from its first token to its last token here
             ├─ queue
             └─ attempt    by the next engine

All spans are created when the request leaves, from data that exists anyway. So they cost nothing while it runs, and
nothing per step. The sampler, which OTEL_* variables choose, decides then, and follows the decision of the parent.

Ids of attempts are computed from the request, so that an attempt links to the previous one even if that sent no span.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue
from redis.exceptions import RedisError

from ....shared.broker.request_history import RequestHistory
from ....shared.errors import PenstockError
from ....shared.messages.deltas import Delta
from ....shared.queue.lifecycle import EventKind, RequestEvent
from ....shared.tracing import attributes
from ....shared.tracing.endpoint import check_endpoint
from ....shared.tracing.provider import close_provider, open_provider
from ....shared.tracing.spans import context_of, tracer_of
from ..requests.generation import Generation
from .observers import Departure, RequestObserver

# Longest wait for the history of a request; after it, the spans are sent without the queue span and the link.
HISTORY_TIMEOUT_S = 10.0

_QUEUE_EVENTS = (
    EventKind.QUEUED,
    EventKind.REPLAYED,
    EventKind.HANDED_BACK,
    EventKind.RECLAIMED,
    EventKind.CONTINUED,
)


class AttemptSpans(RequestObserver):
    """Sender of the spans of one engine to ``endpoint``.

    Args:
        history_of: returns the history of requests in a partition.

    Raises:
        ConfigurationError: as ``check_endpoint``.
    """

    def __init__(self, endpoint: str, model: str, engine_id: str, history_of: Callable[[int], RequestHistory]) -> None:
        self._endpoint = check_endpoint(endpoint)
        self._ids = AttemptIds()
        self._tracer: Tracer = NoOpTracer()
        self._provider: TracerProvider | None = None
        self._model = model
        self._engine_id = engine_id
        self._history_of = history_of
        self._unfinished: set[asyncio.Task[None]] = set()

    def record_end(self, generation: Generation, last: Delta) -> None:
        self._send(generation, lambda span: _set_end(span, last))

    def record_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        self._send(generation, lambda span: _set_departure(span, departure, cause))

    async def open(self) -> None:
        # In a thread, because it resolves the host's name and waits for that.
        self._provider = await asyncio.to_thread(
            open_provider, self._endpoint, service="penstock-worker", instance=self._engine_id, ids=self._ids
        )
        self._tracer = tracer_of(self._provider)

    async def close(self) -> None:
        await asyncio.gather(*self._unfinished)
        provider, self._provider = self._provider, None
        if provider is not None:
            await close_provider(provider)

    def _send(self, generation: Generation, set_outcome: Callable[[Span], None]) -> None:
        """Send the spans of a request that leaves now; ``set_outcome`` adds its outcome to the attempt's span."""
        attempt = _Attempt(generation)
        trace_id = attempt.trace_id or trace_id_of(self._model, generation.request_id)
        self._ids.choose(trace_id=trace_id, span_id=span_id_of(trace_id, generation.request_id, generation.epoch))
        started_ns = attempt.ns(attempt.timestamps.claimed_at_s)
        span = self._tracer.start_span("attempt", attempt.parent, SpanKind.CONSUMER, start_time=started_ns)
        if not span.is_recording():
            return
        span.set_attributes(self._attributes(generation))
        set_outcome(span)
        if generation.attempt == 1:
            self._finish(attempt, span, attempt.ns(attempt.timestamps.arrived_at_s))
            return
        task = asyncio.create_task(self._finish_later(attempt, span))
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)

    def _attributes(self, generation: Generation) -> dict[str, AttributeValue]:
        return {
            **attributes.of_request(self._model, generation.request_id, generation.tenant),
            **attributes.of_params(generation.params),
            "gen_ai.operation.name": generation.operation,
            "gen_ai.response.model": self._model,
            attributes.ENGINE_ID: self._engine_id,
            attributes.ATTEMPT: generation.attempt,
            attributes.EPOCH: generation.epoch,
            attributes.FIRST_TOKEN_INDEX: generation.num_resumed_tokens,
            attributes.NEXT_TOKEN_INDEX: generation.num_output_tokens,
        }

    async def _finish_later(self, attempt: _Attempt, span: Span) -> None:
        """Finish a later attempt. The history tells when and why the request returned to the queue before it."""
        generation = attempt.generation
        events: list[RequestEvent] = []
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S):
                events = await self._history_of(generation.partition).history(generation.request_id)
        except (TimeoutError, PenstockError, RedisError):
            pass
        queued_ns = None
        previous = before_claim(events, generation.epoch)
        if previous is not None:
            last_claim, queued, claim = previous
            queued_ns = attempt.ns(attempt.timestamps.claimed_at_s) - int(1e9 * (claim.at - queued.at))
            if last_claim is not None:
                trace_id = span.get_span_context().trace_id
                span_id = span_id_of(trace_id, generation.request_id, last_claim.epoch)
                context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
                span.add_link(context, _link_attributes(last_claim, queued))
        self._finish(attempt, span, queued_ns)

    def _finish(self, attempt: _Attempt, span: Span, queued_ns: int | None) -> None:
        """Send the parts of an attempt, and end its span. ``queued_ns`` is when it was queued; None if unknown."""
        times, inside = attempt.timestamps, set_span_in_context(span, Context())
        self._ids.choose(trace_id=span.get_span_context().trace_id)
        if queued_ns is not None:
            self._send_part("queue", attempt.parent, queued_ns, attempt.ns(times.claimed_at_s))
        if times.scheduled_at_s is not None:
            prefilled_at_s = times.first_token_at_s or attempt.ended_at_s
            self._send_part("prefill", inside, attempt.ns(times.scheduled_at_s), attempt.ns(prefilled_at_s))
        if times.first_token_at_s is not None and times.last_token_at_s is not None:
            self._send_part("decode", inside, attempt.ns(times.first_token_at_s), attempt.ns(times.last_token_at_s))
        span.end(attempt.ns(attempt.ended_at_s))

    def _send_part(self, name: str, context: Context, started_ns: int, ended_ns: int) -> None:
        self._tracer.start_span(name, context, start_time=started_ns).end(max(started_ns, ended_ns))


class _Attempt:
    """An attempt that ends now."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.parent = context_of(generation.trace_headers)
        self.trace_id = get_current_span(self.parent).get_span_context().trace_id
        self.timestamps = generation.timing.timestamps
        self.ended_at_s = time.monotonic()
        self._offset_ns = time.time_ns() - int(1e9 * self.ended_at_s)

    def ns(self, monotonic_s: float) -> int:
        """Convert a monotonic time to nanoseconds since 1970, the unit of spans."""
        return self._offset_ns + int(1e9 * monotonic_s)


def before_claim(
    events: Sequence[RequestEvent], epoch: int
) -> tuple[RequestEvent | None, RequestEvent, RequestEvent] | None:
    """Return the claim before the one of ``epoch``, the event that queued the request after it, and the claim itself.

    None if the history has no such claim, or no event that queued the request before it.
    """
    last_claim: RequestEvent | None = None
    queued: RequestEvent | None = None
    for event in events:
        if event.kind in _QUEUE_EVENTS:
            queued = event
        elif event.kind is EventKind.CLAIMED:
            if event.epoch == epoch:
                return None if queued is None else (last_claim, queued, event)
            last_claim = event
    return None


def _link_attributes(last_claim: RequestEvent, queued: RequestEvent) -> dict[str, AttributeValue]:
    return {
        attributes.ENGINE_ID: last_claim.engine_id,
        attributes.EPOCH: last_claim.epoch,
        attributes.OUTCOME: queued.kind.value,
        attributes.CAUSE: queued.cause,
        attributes.NEXT_TOKEN_INDEX: queued.num_output_tokens,
    }


def _set_end(span: Span, last: Delta) -> None:
    reason = last.finish_reason or last.segment_finish_reason
    span.set_attribute(attributes.OUTCOME, "ended")
    if reason is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [reason.value])
    if last.usage is not None:
        span.set_attributes(attributes.of_usage(last.usage))
    if last.stats is not None:
        span.set_attributes(attributes.of_stats(last.stats))
    if last.error is not None:
        span.set_attribute(attributes.ERROR, last.error.code)
        span.set_status(Status(StatusCode.ERROR))


def _set_departure(span: Span, departure: Departure, cause: str) -> None:
    span.set_attributes({attributes.OUTCOME: departure.value, attributes.CAUSE: cause})
    if departure is Departure.ENGINE_DIED:
        span.set_attribute(attributes.ERROR, departure.value)
        span.set_status(Status(StatusCode.ERROR))


class AttemptIds(RandomIdGenerator):
    """Generator of random ids, except for ids chosen for the next span. Use it in one thread only."""

    def __init__(self) -> None:
        self._trace_id = self._span_id = 0

    def choose(self, *, trace_id: int, span_id: int = 0) -> None:
        """Set the ids of the next span: the trace id if it has no parent, the span id unless it is 0."""
        self._trace_id, self._span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        return self._trace_id or super().generate_trace_id()

    def generate_span_id(self) -> int:
        chosen, self._span_id = self._span_id, 0
        return chosen or super().generate_span_id()


def trace_id_of(model: str, request_id: str) -> int:
    """Return the trace id of a request that has no trace context."""
    return _digest(f"{model} {request_id}", 16)


def span_id_of(trace_id: int, request_id: str, epoch: int) -> int:
    """Return the span id of an attempt."""
    return _digest(f"{trace_id:032x} {request_id} {epoch}", 8)


def _digest(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()) or 1
