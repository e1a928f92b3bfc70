"""The measurements of an offline run, and the statistics in its output file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import psutil

from ....shared.errors import PenstockError
from ....shared.messages.core import EngineCoreOutput, SchedulerStats
from ....shared.stats import StepStats


class OfflineResult(msgspec.Struct, kw_only=True):
    """The output file of one run.

    TTFT is measured from a request's arrival or, with limited concurrency, from its entry into the engine. ITL is the
    time between two tokens of a request.

    Args:
        token_times_s, sent_s: times since the start at which each request's tokens arrived, and at which it entered.
        rss_before_bytes, rss_queued_bytes: resident memory at the start, and once the first requests had entered.
        steps: statistics of each step, if requested.
        device_busy_share: share of the time in which the GPU computed; None unless requested.
        num_draft_tokens, num_accepted_tokens: draft tokens in this run, and the accepted ones among them.
        cpu_s: processor time of the process in this run, summed over its threads.
    """

    name: str = ""

    output_token_ids: list[list[int]]
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    load_s: float
    rss_bytes: int
    num_steps: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    token_times_s: list[list[float]]
    sent_s: list[float]
    rss_before_bytes: int
    rss_queued_bytes: int
    steps: list[StepStats] = []
    device_busy_share: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cpu_s: float = 0.0


class PhasesResult(msgspec.Struct, kw_only=True):
    """The output file of a workload of phases; ``ready_s`` is the time from the process start to the first phase."""

    ready_s: float
    rss_bytes: int
    peak_rss_bytes: int
    phases: list[OfflineResult]


@dataclass
class Record:
    """Measurements of a run: per request, by its index in the workload, and per step."""

    outputs: list[list[int]]
    token_times_s: list[list[float]]
    sent_s: list[float]
    rss_before_bytes: int
    rss_queued_bytes: int
    steps: list[StepStats] = field(default_factory=list)

    @classmethod
    def of(cls, num_requests: int) -> Record:
        now_bytes = rss_bytes()
        requests = range(num_requests)
        return cls([[] for _ in requests], [[] for _ in requests], [0.0] * num_requests, now_bytes, now_bytes)

    def note(self, outputs: list[EngineCoreOutput], now_s: float) -> None:
        """Record the outputs of a step.

        Raises:
            PenstockError: a request failed.
        """
        for output in outputs:
            if output.error is not None:
                raise PenstockError(f"request {output.request_id}: {output.error.message}")
            self.outputs[int(output.request_id)] += output.new_token_ids
            self.token_times_s[int(output.request_id)] += [now_s] * len(output.new_token_ids)

    def result(
        self, stats: SchedulerStats, before: SchedulerStats, wall_s: float, load_s: float, cpu_s: float
    ) -> OfflineResult:
        """Compute the statistics; ``before`` are the counters at the start of the run."""
        ttft_ms = [
            1e3 * (times[0] - sent) for times, sent in zip(self.token_times_s, self.sent_s, strict=True) if times
        ]
        itl_ms = [1e3 * (b - a) for times in self.token_times_s for a, b in pairwise(times)]
        num_tokens = sum(map(len, self.outputs))
        return OfflineResult(
            output_token_ids=self.outputs,
            output_tokens=num_tokens,
            wall_s=wall_s,
            output_tokens_per_s=num_tokens / wall_s,
            ttft_p50_ms=_percentile(ttft_ms, 0.5),
            ttft_p99_ms=_percentile(ttft_ms, 0.99),
            itl_p50_ms=_percentile(itl_ms, 0.5),
            itl_p99_ms=_percentile(itl_ms, 0.99),
            load_s=load_s,
            rss_bytes=rss_bytes(),
            num_steps=stats.step_counter,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            token_times_s=self.token_times_s,
            sent_s=self.sent_s,
            rss_before_bytes=self.rss_before_bytes,
            rss_queued_bytes=self.rss_queued_bytes,
            steps=self.steps,
            num_draft_tokens=stats.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens - before.num_accepted_tokens,
            cpu_s=cpu_s,
        )


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss


def _percentile(values: list[float], share: float) -> float:
    """Return the nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
