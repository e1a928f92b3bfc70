"""Metrics port of a worker: the metrics of its engines, and probes.

The metrics come from the status lines of the worker processes, so each engine has one writer, and a scrape does not
query Redis. Only the readiness probe queries it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from importlib import metadata

import structlog
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.metrics import Sample, engines_samples, values_of
from ...shared.metrics.exposition import MetricNames, expose
from ..config.worker_config import WorkerConfig
from .http_server import Answer, Answers, HttpServer
from .restart import Phase
from .supervised_engine import Engine

REDIS_PATIENCE_S = 2.0
VERSION = metadata.version("penstock")  # read once, because it reads files

log = structlog.get_logger()


class MetricsServer:
    """Listener on the metrics port, from its creation to ``close``.

    Args:
        names: one of ``MetricNames``.

    Raises:
        ConfigurationError: the address cannot be used; says why.
    """

    def __init__(self, host: str, port: int, names: str) -> None:
        self._names = MetricNames(names)
        self._server = HttpServer(host, port)

    @property
    def url(self) -> str:
        """URL of the listener."""
        return self._server.url

    def start(
        self, config: WorkerConfig, engines: Sequence[Engine], redis: CommandConnection, is_leaving: Callable[[], bool]
    ) -> None:
        """Answer requests in the running event loop. Arguments are those of ``HostMetrics``."""
        self._server.start(HostMetrics(config, engines, redis, is_leaving, self._names).answers)
        log.info("metrics_served", url=f"{self.url}/metrics")

    def close(self) -> None:
        self._server.close()


class HostMetrics:
    """Metrics and probes of the engines of one supervisor.

    Args:
        redis: connection of the supervisor.
        is_leaving: returns whether the supervisor is stopping.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engines: Sequence[Engine],
        redis: CommandConnection,
        is_leaving: Callable[[], bool],
        names: MetricNames,
    ) -> None:
        self._engines = engines
        self._redis = redis
        self._is_leaving = is_leaving
        self._names = names
        self._leases = Keys(config.namespace).model(config.engine.model_name).leases

    @property
    def answers(self) -> Answers:
        """Answer functions by path."""
        return {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}

    async def _metrics(self) -> Answer:
        return Answer(expose(self._samples(), self._names), content_type=CONTENT_TYPE_LATEST)

    def _samples(self) -> Iterator[Sample]:
        yield from values_of((VERSION,), {"build_info": 1.0})
        heartbeats = [engine.heartbeat_unless_left() for engine in self._engines]
        yield from engines_samples([heartbeat for heartbeat in heartbeats if heartbeat is not None])

    async def _healthz(self) -> Answer:
        return Answer.of({"status": "ok"})

    async def _readyz(self) -> Answer:
        reason = self._not_serving() or await self._no_redis()
        if reason:
            return Answer.of({"error": reason}, HTTPStatus.SERVICE_UNAVAILABLE)
        return Answer.of({"status": "ok"})

    def _not_serving(self) -> str:
        if self._is_leaving():
            return "the worker is draining"
        missing = [engine for engine in self._engines if engine.policy.phase not in (Phase.SERVING, Phase.LEFT)]
        return "; ".join(f"engine {engine.engine_id} is {engine.policy.phase}" for engine in missing)

    async def _no_redis(self) -> str:
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                await self._redis.execute("EXISTS", self._leases)
        except (TimeoutError, PenstockError, RedisError) as error:
            return f"Redis cannot be used: {str(error) or f'no answer within {REDIS_PATIENCE_S:g} s'}"
        return ""
