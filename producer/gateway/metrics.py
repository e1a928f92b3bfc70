"""Figures for Prometheus: what the gateway counts itself, and what the client can read of queues and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...shared.errors import RedisUnavailableError
from ...shared.messages import EngineState
from ...shared.queue_stats import QueueStats
from ...shared.records import EngineHeartbeat
from ...shared.stats import REQUEST_TIME_BOUNDS_S
from .. import Client

# Prometheus waits 10 s for all of them.
QUEUE_PATIENCE_S = 3.0


class Metrics:
    """The gateway's own counts. ``route`` is the path of the route, not of the request, so that there are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "penstock_http_requests", "HTTP requests answered", ["route", "method", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "penstock_http_request_duration_seconds",
            "From the request's head to the end of its response",
            ["route"],
            buckets=REQUEST_TIME_BOUNDS_S,
            registry=self.registry,
        )
        self.first_chunk = Histogram(
            "penstock_http_time_to_first_chunk_seconds",
            "From the request's head to the first chunk of a stream",
            ["route"],
            buckets=REQUEST_TIME_BOUNDS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge("penstock_http_requests_in_flight", "HTTP requests under way", registry=self.registry)
        self.resumed = Counter(
            "penstock_http_streams_resumed", "Streams picked up with Last-Event-ID", registry=self.registry
        )

    def render(self, deployment: Iterable[Metric]) -> bytes:
        """Return all figures as text, those of the deployment included."""
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(list(deployment)))
        return generate_latest(self.registry) + generate_latest(snapshot)


class _Snapshot:
    """Figures that were read before they are asked for."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class ModelFigures(msgspec.Struct, frozen=True):
    """One model's queue and engines."""

    queue: QueueStats | None
    engines: list[EngineHeartbeat]


async def read_deployment(client: Client) -> dict[str, ModelFigures]:
    """Return the figures of all models."""
    models = await client.models()
    queues = await asyncio.gather(*(_queue_stats(client, model) for model in models))
    return {
        model: ModelFigures(queue, await client.engines(model)) for model, queue in zip(models, queues, strict=True)
    }


async def _queue_stats(client: Client, model: str) -> QueueStats | None:
    """None where the Redis that holds the model is away; the figures of the others are told all the same."""
    try:
        async with asyncio.timeout(QUEUE_PATIENCE_S):
            return await client.queue_stats(model, tenants=False)
    except (TimeoutError, RedisUnavailableError):
        return None


def deployment_metrics(figures: Mapping[str, ModelFigures]) -> list[Metric]:
    """Return what ``read_deployment`` found as metrics."""
    return [*_queue_metrics(figures), *_engine_metrics(figures)]


def _queue_metrics(figures: Mapping[str, ModelFigures]) -> list[Metric]:
    waiting = GaugeMetricFamily("penstock_queue_waiting_requests", "Requests that wait", labels=["model", "band"])
    tokens = GaugeMetricFamily("penstock_queue_waiting_tokens", "Tokens that wait", labels=["model"])
    oldest = GaugeMetricFamily("penstock_queue_oldest_age_seconds", "Age of the oldest that waits", labels=["model"])
    paused = GaugeMetricFamily("penstock_queue_paused", "1 while nothing is handed out", labels=["model"])
    warm = CounterMetricFamily(
        "penstock_queue_warm_requests", "Those whose conversation an engine had", labels=["model"]
    )
    kept = CounterMetricFamily("penstock_queue_warm_kept_requests", "Those that went to that engine", labels=["model"])
    for model, figure in figures.items():
        queue = figure.queue
        if queue is None:
            continue
        for band in queue.bands:
            waiting.add_metric([model, band.band], band.depth)
        tokens.add_metric([model], queue.num_tokens)
        oldest.add_metric([model], queue.oldest_age_s)
        paused.add_metric([model], float(queue.paused_at is not None))
        warm.add_metric([model], queue.num_warm)
        kept.add_metric([model], queue.num_warm_kept)
    return [waiting, tokens, oldest, paused, warm, kept]


def _engine_metrics(figures: Mapping[str, ModelFigures]) -> list[Metric]:
    names = ["model", "engine"]
    up = GaugeMetricFamily("penstock_engine_up", "1 if the engine serves", labels=[*names, "state"])
    running = GaugeMetricFamily("penstock_engine_running_requests", "Requests in the batch", labels=names)
    usage = GaugeMetricFamily("penstock_engine_kv_cache_usage_ratio", "Share of the KV cache in use", labels=names)
    prompt = CounterMetricFamily("penstock_engine_prompt_tokens", "Prompt tokens of ended requests", labels=names)
    output = CounterMetricFamily("penstock_engine_generation_tokens", "Output tokens of ended requests", labels=names)
    ended = CounterMetricFamily("penstock_engine_requests", "Ended requests", labels=[*names, "finish_reason"])
    for model, figure in figures.items():
        for engine in figure.engines:
            labels = [model, engine.engine_id]
            serves = engine.state in (EngineState.READY, EngineState.BUSY, EngineState.COMPILING)
            up.add_metric([*labels, engine.state.value], float(serves))
            running.add_metric(labels, engine.num_running_reqs)
            usage.add_metric(labels, engine.kv_cache_usage)
            if engine.stats is None:
                continue
            prompt.add_metric(labels, engine.stats.num_prompt_tokens)
            output.add_metric(labels, engine.stats.num_output_tokens)
            for reason, count in engine.stats.num_finished.items():
                ended.add_metric([*labels, reason], count)
    return [up, running, usage, prompt, output, ended]
