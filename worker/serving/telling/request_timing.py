"""Follows one claimed request through time."""

from __future__ import annotations

import time
from typing import NamedTuple

from ....shared.broker import Claim
from ....shared.messages.deltas import Delta
from ....shared.messages.from_core import EngineCoreEventType, EngineCoreOutput
from ....shared.stats.engine import RequestStats


class Moments(NamedTuple):
    """When what happened to a request at this engine, by the monotonic clock of this host; None for what has not."""

    arrived_at_s: float
    claimed_at_s: float
    scheduled_at_s: float | None
    first_token_at_s: float | None
    last_token_at_s: float | None


class RequestTiming:
    """Knows the request's age at what happens to it, from its arrival in Redis on, by the monotonic clock of this host.

    A resumed request had its first token elsewhere: what the log says of that is kept. The result of a prompt that is
    pooled counts as its first token.

    Args:
        logged: what former engines have delivered.
    """

    def __init__(self, claim: Claim, logged: list[Delta]) -> None:
        self._claimed_at_s = time.monotonic()
        self._arrived_at_s = self._claimed_at_s - claim.waited_ms / 1000
        self._num_deliveries = claim.attempt
        self._num_preemptions = 0
        self._age_scheduled_s: float | None = None
        first = next((delta.stats for delta in logged if delta.stats is not None), None)
        self._first = first
        self._was_told = first is not None
        self._token_at_s: float | None = None
        self._first_token_at_s: float | None = None

    def note_output(self, output: EngineCoreOutput, timestamp: float) -> float | None:
        """Take in what the core tells; returns the seconds from this engine's last token to the first of these, if
        there are both.

        Args:
            timestamp: monotonic seconds at which the step ended.
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
    def moments(self) -> Moments:
        scheduled_at_s = None if self._age_scheduled_s is None else self._arrived_at_s + self._age_scheduled_s
        return Moments(self._arrived_at_s, self._claimed_at_s, scheduled_at_s, self._first_token_at_s, self._token_at_s)

    @property
    def has_told_first_token(self) -> bool:
        return self._first is not None

    @property
    def made_first_token(self) -> bool:
        """Whether the first token was told of, and came from this engine."""
        return self._first is not None and not self._was_told

    def first_token(self) -> RequestStats | None:
        """What to say with the first token, once; None if it came before."""
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
        """What to say at the end, which is now."""
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
