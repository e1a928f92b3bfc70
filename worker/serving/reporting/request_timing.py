"""Timing of one claimed request."""

from __future__ import annotations

import time
from typing import NamedTuple

from ....shared.broker import Claim
from ....shared.messages.core import EngineCoreEventType, EngineCoreOutput
from ....shared.messages.deltas import Delta
from ....shared.stats import RequestStats


class RequestTimestamps(NamedTuple):
    """Times of a request's events at this engine, in monotonic seconds; None for events that did not occur."""

    arrived_at_s: float
    claimed_at_s: float
    scheduled_at_s: float | None
    first_token_at_s: float | None
    last_token_at_s: float | None


class RequestTiming:
    """Ages of a request at its events, since its arrival in Redis, by this host's monotonic clock.

    For a resumed request, the statistics of its first token are those in the log. The result of a pooling request
    counts as its first token.

    Args:
        logged: deltas that former engines have delivered.
    """

    def __init__(self, claim: Claim, logged: list[Delta]) -> None:
        self._claimed_at_s = time.monotonic()
        self._arrived_at_s = self._claimed_at_s - claim.waited_ms / 1000
        self._num_deliveries = claim.attempt
        self._num_preemptions = 0
        self._age_scheduled_s: float | None = None
        first = next((delta.stats for delta in logged if delta.stats is not None), None)
        self._first = first
        self._is_first_from_log = first is not None
        self._token_at_s: float | None = None
        self._first_token_at_s: float | None = None

    def note_output(self, output: EngineCoreOutput, timestamp: float) -> float | None:
        """Process an output of the core. Returns the seconds since this engine's previous token, if it had one.

        Args:
            timestamp: when the step ended, in monotonic seconds.
        """
        for event in output.events:
            if event.type is EngineCoreEventType.SCHEDULED and self._age_scheduled_s is None:
                self._age_scheduled_s = self._age_s(event.timestamp)
            elif event.type is EngineCoreEventType.PREEMPTED:
                self._num_preemptions += 1
        if not output.new_token_ids and output.pooled is None:
            return None
        last, self._token_at_s = self._token_at_s, timestamp
        if last is None:
            self._first_token_at_s = timestamp
            return None
        return timestamp - last

    @property
    def timestamps(self) -> RequestTimestamps:
        scheduled_at_s = None if self._age_scheduled_s is None else self._arrived_at_s + self._age_scheduled_s
        return RequestTimestamps(
            self._arrived_at_s, self._claimed_at_s, scheduled_at_s, self._first_token_at_s, self._token_at_s
        )

    @property
    def has_sent_first_token(self) -> bool:
        return self._first is not None

    @property
    def has_generated_first_token(self) -> bool:
        """Whether the first token was sent, and this engine generated it."""
        return self._first is not None and not self._is_first_from_log

    def first_token(self) -> RequestStats | None:
        """Return the statistics to send with the first token, once; None in later calls or before that token."""
        if self._first is not None or self._token_at_s is None:
            return None
        age_s = self._age_s(self._token_at_s)
        queue_time_s = age_s if self._age_scheduled_s is None else self._age_scheduled_s
        self._first = RequestStats(
            queue_time_s=queue_time_s,
            prefill_time_s=age_s - queue_time_s,
            time_to_first_token_s=age_s,
            latency_s=age_s,
            num_preemptions=self._num_preemptions,
            num_deliveries=self._num_deliveries,
        )
        return self._first

    def whole(self, num_output_tokens: int) -> RequestStats:
        """Return the statistics to send at the end, which is now."""
        latency_s = self._age_s(time.monotonic())
        first = self._first or RequestStats(queue_time_s=latency_s)
        decode_time_s = 0.0
        if self._token_at_s is not None:
            decode_time_s = max(0.0, self._age_s(self._token_at_s) - first.time_to_first_token_s)
        return RequestStats(
            queue_time_s=first.queue_time_s,
            prefill_time_s=first.prefill_time_s,
            decode_time_s=decode_time_s,
            time_to_first_token_s=first.time_to_first_token_s,
            inter_token_latency_s=decode_time_s / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0,
            latency_s=latency_s,
            num_preemptions=self._num_preemptions,
            num_deliveries=self._num_deliveries,
        )

    def _age_s(self, monotonic_s: float) -> float:
        return max(0.0, monotonic_s - self._arrived_at_s)
