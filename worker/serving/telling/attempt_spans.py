"""Spans of what an engine did for a request: how long that had waited, the attempt, and in it prefill and decode.

    enqueue ─┬─ queue      from its arrival, or from when it was put back in line, to the claim
             ├─ attempt    from the claim to its end here; links to the attempt before
             │   ├─ prefill    from when it was first scheduled to its first token here
             │   └─ decode     from there to its last token here
             ├─ queue
             └─ attempt    by the next engine

All of them are made when the request leaves, from what is known of it anyhow: one that runs costs nothing, nor does the
step. The sampler, which OTEL_* variables choose, is asked then, and goes by the parent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
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
from ....shared.queue.request_events import EventKind, RequestEvent
from ....shared.tracing import attributes
from ....shared.tracing.endpoint import check_endpoint
from ....shared.tracing.provider import close_provider, open_provider
from ....shared.tracing.spans import context_of, tracer_of
from ..requests.generation import Generation
from .attempt_ids import AttemptIds, span_id_of, trace_id_of
from .request_observer import Departure, RequestObserver

# What a request has lived through is not waited for longer: its spans are told without it then.
HISTORY_TIMEOUT_S = 10.0

_INTO_LINE = (
    EventKind.QUEUED,
    EventKind.REPLAYED,
    EventKind.HANDED_BACK,
    EventKind.RECLAIMED,
    EventKind.CONTINUED,
)


class AttemptSpans(RequestObserver):
    """Sends the spans of one engine to ``endpoint``. ``history_of`` a partition tells what its requests lived through.

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
        self._under_way: set[asyncio.Task[None]] = set()

    def note_end(self, generation: Generation, last: Delta) -> None:
        self._note(generation, lambda span: _tell_end(span, last))

    def note_departure(self, generation: Generation, departure: Departure, cause: str = "") -> None:
        self._note(generation, lambda span: _tell_departure(span, departure, cause))

    async def open(self) -> None:
        # It asks the host who it is, in threads for which it waits.
        self._provider = await asyncio.to_thread(
            open_provider, self._endpoint, service="penstock-worker", instance=self._engine_id, ids=self._ids
        )
        self._tracer = tracer_of(self._provider)

    async def close(self) -> None:
        await asyncio.gather(*self._under_way)
        provider, self._provider = self._provider, None
        if provider is not None:
            await close_provider(provider)

    def _note(self, generation: Generation, tell: Callable[[Span], None]) -> None:
        attempt = _Attempt(generation)
        trace_id = attempt.trace_id or trace_id_of(self._model, generation.request_id)
        self._ids.choose(trace_id=trace_id, span_id=span_id_of(trace_id, generation.request_id, generation.epoch))
        started_ns = attempt.ns(attempt.moments.claimed_at_s)
        span = self._tracer.start_span("attempt", attempt.parent, SpanKind.CONSUMER, start_time=started_ns)
        if not span.is_recording():
            return
        span.set_attributes(self._of(generation))
        tell(span)
        if generation.attempt == 1:
            self._finish(attempt, span, attempt.ns(attempt.moments.arrived_at_s))
            return
        task = asyncio.create_task(self._finish_later(attempt, span))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _of(self, generation: Generation) -> dict[str, AttributeValue]:
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
        """One of an engine that was not the first: when it was put back in line, and why, others have written down."""
        generation = attempt.generation
        events: list[RequestEvent] = []
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S):
                events = await self._history_of(generation.partition).history(generation.request_id)
        except (TimeoutError, PenstockError, RedisError):
            pass
        queued_ns = None
        before = before_claim(events, generation.epoch)
        if before is not None:
            claimed, into_line, now = before
            queued_ns = attempt.ns(attempt.moments.claimed_at_s) - int(1e9 * (now.at - into_line.at))
            if claimed is not None:
                trace_id = span.get_span_context().trace_id
                span_id = span_id_of(trace_id, generation.request_id, claimed.epoch)
                told = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
                span.add_link(told, _of_link(claimed, into_line))
        self._finish(attempt, span, queued_ns)

    def _finish(self, attempt: _Attempt, span: Span, queued_ns: int | None) -> None:
        """Tell the parts of an attempt, and end it. ``queued_ns`` is since when it had waited, where that is known."""
        moments, inside = attempt.moments, set_span_in_context(span, Context())
        self._ids.choose(trace_id=span.get_span_context().trace_id)
        if queued_ns is not None:
            self._tell("queue", attempt.parent, queued_ns, attempt.ns(moments.claimed_at_s))
        if moments.scheduled_at_s is not None:
            prefilled_at_s = moments.first_token_at_s or attempt.ended_at_s
            self._tell("prefill", inside, attempt.ns(moments.scheduled_at_s), attempt.ns(prefilled_at_s))
        if moments.first_token_at_s is not None and moments.last_token_at_s is not None:
            self._tell("decode", inside, attempt.ns(moments.first_token_at_s), attempt.ns(moments.last_token_at_s))
        span.end(attempt.ns(attempt.ended_at_s))

    def _tell(self, name: str, context: Context, started_ns: int, ended_ns: int) -> None:
        self._tracer.start_span(name, context, start_time=started_ns).end(max(started_ns, ended_ns))


class _Attempt:
    """What is known of an attempt when it ends, which is now."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.parent = context_of(generation.trace_headers)
        self.trace_id = get_current_span(self.parent).get_span_context().trace_id
        self.moments = generation.timing.moments
        self.ended_at_s = time.monotonic()
        self._offset_ns = time.time_ns() - int(1e9 * self.ended_at_s)

    def ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970, as spans have them."""
        return self._offset_ns + int(1e9 * monotonic_s)


def before_claim(
    events: Sequence[RequestEvent], epoch: int
) -> tuple[RequestEvent | None, RequestEvent, RequestEvent] | None:
    """Return the claim before the one of this epoch, what put the request into line after it, and this claim itself."""
    claimed: RequestEvent | None = None
    into_line: RequestEvent | None = None
    for event in events:
        if event.kind in _INTO_LINE:
            into_line = event
        elif event.kind is EventKind.CLAIMED:
            if event.epoch == epoch:
                return None if into_line is None else (claimed, into_line, event)
            claimed = event
    return None


def _of_link(claimed: RequestEvent, into_line: RequestEvent) -> dict[str, AttributeValue]:
    return {
        attributes.ENGINE_ID: claimed.engine_id,
        attributes.EPOCH: claimed.epoch,
        attributes.OUTCOME: into_line.kind.value,
        attributes.CAUSE: into_line.cause,
        attributes.NEXT_TOKEN_INDEX: into_line.num_output_tokens,
    }


def _tell_end(span: Span, last: Delta) -> None:
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


def _tell_departure(span: Span, departure: Departure, cause: str) -> None:
    span.set_attributes({attributes.OUTCOME: departure.value, attributes.CAUSE: cause})
    if departure is Departure.ENGINE_DIED:
        span.set_attribute(attributes.ERROR, departure.value)
        span.set_status(Status(StatusCode.ERROR))
