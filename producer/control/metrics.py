"""A model's figures at one moment, as vLLM's ``get_metrics`` gives them: from heartbeats and from the queue.

Names follow vLLM's, with "penstock:" for "vllm:"; labels are ``model_name`` and, of what an engine tells, ``engine``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shared.queue_stats import QueueStats
from ...shared.records import EngineHeartbeat
from ...shared.stats import EngineStats
from ...shared.stats import Histogram as Counts

PREFIX = "penstock:"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the three kinds."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """Only grows while its engine lives, and begins at 0 again with the next."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """Goes up and down."""

    value: float


class Histogram(Metric, frozen=True, kw_only=True):
    """``buckets`` count, by upper bound ("+Inf" the last), the values that are at most that."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engines: Sequence[EngineHeartbeat], queue: QueueStats) -> list[Metric]:
    """Return the figures of one model."""
    metrics: list[Metric] = [*_of_queue(queue)]
    for engine in engines:
        labels = {"model_name": engine.model, "engine": engine.engine_id}
        metrics += [
            _gauge("num_requests_running", labels, engine.num_running_reqs),
            _gauge("engine_num_requests_waiting", labels, engine.num_waiting_reqs),
            _gauge("kv_cache_usage_perc", labels, engine.kv_cache_usage),
            _gauge("generation_tokens_per_s", labels, engine.tokens_per_s),
            _gauge("engine_sleep_state", labels, engine.state == "sleeping"),
        ]
        if engine.stats is not None:
            metrics += _of_engine(engine.stats, labels)
    return metrics


def _of_queue(queue: QueueStats) -> list[Metric]:
    labels = {"model_name": queue.model}
    return [
        _gauge("num_requests_waiting", labels, queue.depth),
        _gauge("queue_tokens_waiting", labels, queue.num_tokens),
        _gauge("queue_oldest_age_seconds", labels, queue.oldest_age_s),
        _gauge("queue_paused", labels, queue.is_paused),
    ]


def _of_engine(stats: EngineStats, labels: dict[str, str]) -> list[Metric]:
    counted = {
        "prompt_tokens_total": stats.num_prompt_tokens,
        "generation_tokens_total": stats.num_output_tokens,
        "num_preemptions_total": stats.num_preemptions,
        "prefix_cache_queries_total": stats.prefix_cache_queries,
        "prefix_cache_hits_total": stats.prefix_cache_hits,
        "engine_steps_total": stats.num_steps,
    }
    histograms = {
        "time_to_first_token_seconds": stats.time_to_first_token_s,
        "inter_token_latency_seconds": stats.inter_token_latency_s,
        "e2e_request_latency_seconds": stats.latency_s,
        "request_queue_time_seconds": stats.queue_time_s,
        "request_prefill_time_seconds": stats.prefill_time_s,
        "request_decode_time_seconds": stats.decode_time_s,
        "engine_step_time_seconds": stats.step_time_s,
    }
    finished = (
        Counter(name=f"{PREFIX}request_success_total", labels={**labels, "finished_reason": reason}, value=number)
        for reason, number in sorted(stats.num_finished.items())
    )
    return [
        *finished,
        *(Counter(name=PREFIX + name, labels=labels, value=value) for name, value in counted.items()),
        *(_histogram(name, labels, counts) for name, counts in histograms.items()),
    ]


def _gauge(name: str, labels: dict[str, str], value: float) -> Gauge:
    return Gauge(name=PREFIX + name, labels=labels, value=float(value))


def _histogram(name: str, labels: dict[str, str], counts: Counts) -> Histogram:
    buckets, at_most = {}, 0
    for bound, number in zip((*map(str, counts.bounds), "+Inf"), counts.counts, strict=True):
        at_most += number
        buckets[bound] = at_most
    return Histogram(name=PREFIX + name, labels=labels, count=at_most, sum=counts.sum, buckets=buckets)
