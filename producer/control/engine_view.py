"""The client's view of the engines that serve a model: their state, health and metrics.

Metrics have the form of vLLM's ``get_metrics``. Their names are those of ``shared/metrics`` with the prefix
"penstock:". A metric that vLLM has too has vLLM's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import EngineDeadError
from ...shared.metrics import MetricKind, Sample, engines_samples, queue_samples
from ...shared.process.log import get_logger
from ...shared.queue.stats import QueueStats
from ...shared.stats import Histogram as Counts
from ..client_parts.core import ClientCore

log = get_logger(__name__)
PREFIX = "penstock:"


class EngineView(ClientCore):
    """The part of the client that reads the state of engines. ``model`` may be left out as for a request."""

    async def engines(self, model: str | None = None) -> list[EngineHeartbeat]:
        """Return the last heartbeat of each engine of the model, ordered by engine id.

        A heartbeat holds the engine's state and load. Its ``stats`` hold the counters since the engine's start, for
        metrics.

        Raises:
            UnknownModelError: no worker has ever served ``model`` here.
        """
        return await self._health.engines((await self._card(model)).model)

    async def get_metrics(self, model: str | None = None) -> list[Metric]:
        """Return the metrics of the model's queue and engines: counters, gauges and histograms, with labels.

        They are computed from ``engines`` and ``queue_stats``.

        Raises: as ``engines``.
        """
        engines, queue = await self._read_state(model)
        return metrics_of(engines, queue)

    async def do_log_stats(self, model: str | None = None) -> None:
        """Log one line for the model's queue and one for each of its engines, at level INFO.

        Raises: as ``engines``.
        """
        engines, queue = await self._read_state(model)
        log.info(
            "queue_stats",
            model=queue.model,
            num_running=queue.num_running,
            num_waiting=queue.depth,
            oldest_age_s=round(queue.oldest_age_s, 2),
            tokens_per_s=round(queue.tokens_per_s, 1),
        )
        for engine in engines:
            log.info(
                "engine_stats",
                engine_id=engine.engine_id,
                state=engine.state.value,
                num_running=engine.num_running_reqs,
                num_waiting=engine.num_waiting_reqs,
                kv_cache_usage=round(engine.kv_cache_usage, 3),
                tokens_per_s=round(engine.tokens_per_s, 1),
                error=engine.error,
            )

    async def _read_state(self, model: str | None) -> tuple[list[EngineHeartbeat], QueueStats]:
        engines = await self.engines(model)
        return engines, await (await self._queue(model)).stats()

    async def check_health(self, model: str | None = None) -> None:
        """Return if a live engine serves the model, according to the current heartbeats.

        An engine that is ready, busy, compiling, draining or sleeping is live; a starting, stalled or dead one is not.

        Raises:
            EngineDeadError: no engine is live; lists each known engine and its cause.
            UnknownModelError: no worker has ever served ``model`` here.
        """
        await self._health.check((await self._card(model)).model)

    @property
    def errored(self) -> bool:
        """Whether no live engine served a model of this client when it last checked; returns immediately.

        Set by ``check_health`` and by every ``EngineDeadError`` of a request of this client. Cleared by a successful
        ``check_health`` and by a new token of a request for that model. While this property is read at least every ten
        seconds, the client checks the heartbeats of its models every second.
        """
        if self._requests.lifecycle.is_open:
            self._health_watch.look()
        return self._health.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The newest error that set ``errored``; a placeholder error if no engine is known to be dead."""
        return self._health.dead_error or EngineDeadError("no engine is known to be dead")

    @property
    def is_running(self) -> bool:
        """Whether the client is connected and not ``errored``."""
        return self._requests.lifecycle.is_open and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the three kinds of metrics."""

    name: str
    labels: dict[str, str]


class Counter(Metric, frozen=True, kw_only=True):
    """A value that only grows while its engine process runs; a new process starts at 0."""

    value: int


class Gauge(Metric, frozen=True, kw_only=True):
    """A value that rises and falls."""

    value: float


class Histogram(Metric, frozen=True, kw_only=True):
    """A distribution. ``buckets`` maps each upper bound (the last is "+Inf") to the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(engines: Sequence[EngineHeartbeat], queue: QueueStats) -> list[Metric]:
    """Return the metrics of one model."""
    samples = [*queue_samples(queue), *engines_samples(engines)]
    return [*map(_metric, samples)]


def _metric(sample: Sample) -> Metric:
    spec, value = sample.spec, sample.value
    name, labels = PREFIX + spec.name, dict(zip(spec.labels, sample.labels, strict=True))
    if isinstance(value, Counts):
        return Histogram(name=name, labels=labels, count=value.count, sum=value.sum, buckets=dict(value.cumulative()))
    if spec.kind == MetricKind.COUNTER:
        return Counter(name=f"{name}_total", labels=labels, value=int(value))
    return Gauge(name=name, labels=labels, value=float(value))
