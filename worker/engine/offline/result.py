"""What a run of the engine alone notes, and the figures made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import psutil

from ....shared.errors import PenstockError
from ....shared.messages.from_core import EngineCoreOutput, SchedulerStats
from ....shared.stats.engine import StepStats


class OfflineResult(msgspec.Struct, kw_only=True):
    """The output file. TTFT counts from a request's arrival, or from when there was room for it. ITL is the time
    between two tokens of a request.

    Args:
        token_times_s: of each request, when its tokens came, and ``sent_s``, when it entered; since the start.
        rss_before_bytes, rss_queued_bytes: resident memory at the start, and once the first requests had entered.
        steps: what each step did, if that was asked for.
        device_busy_share: of the time, in which a GPU computed, if that was asked for.
        num_draft_tokens, num_accepted_tokens: drafts in this run, and those of them that came true.
        cpu_s: processor time of the process in this run, all its threads together.
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
    """The output file of a workload of phases; ``ready_s`` is the time from the start of the process to its first."""

    ready_s: float
    rss_bytes: int
    peak_rss_bytes: int
    phases: list[OfflineResult]


@dataclass
class Record:
    """What a run notes of its requests, by their index, and of its steps."""

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
        """Take in what a step gave out; raises ``PenstockError`` if that is a failure."""
        for output in outputs:
            if output.error is not None:
                raise PenstockError(f"request {output.request_id}: {output.error.message}")
            self.outputs[int(output.request_id)] += output.new_token_ids
            self.token_times_s[int(output.request_id)] += [now_s] * len(output.new_token_ids)

    def result(
        self, stats: SchedulerStats, before: SchedulerStats, wall_s: float, load_s: float, cpu_s: float
    ) -> OfflineResult:
        """Reduce it to figures; ``before`` are the counters when the run began."""
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
    """The nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
