"""Metrics port of a worker: the metrics of its engines, and probes.

The metrics come from the status lines of the worker processes, so each engine has one writer, and a scrape does not
query Redis. Only the readiness probe queries it.

The HTTP server runs in threads, and asks the event loop for each answer. So a slow reader blocks nothing, and a probe
learns that the event loop hangs instead of waiting for it. It is the server of the standard library, as that of
prometheus_client, because a worker needs no web framework.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import socketserver
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST
from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.errors import ConfigurationError, PenstockError
from ...shared.keys import Keys
from ...shared.metrics import Sample, engines_samples, values_of
from ...shared.metrics.exposition import MetricNames, expose
from ...shared.values.distribution import VERSION
from ...shared.values.shown import shown
from ..config.worker_config import WorkerConfig
from .supervised_engine import Engine

REDIS_PATIENCE_S = 2.0

log = structlog.get_logger()
LOOP_PATIENCE_S = 3.0
CLIENT_PATIENCE_S = 10.0
JSON = "application/json"


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
        return "; ".join(filter(None, (engine.unreadiness for engine in self._engines)))

    async def _no_redis(self) -> str:
        try:
            async with asyncio.timeout(REDIS_PATIENCE_S):
                await self._redis.execute("EXISTS", self._leases)
        except (TimeoutError, PenstockError, RedisError) as error:
            return f"Redis cannot be used: {str(error) or f'no answer within {REDIS_PATIENCE_S:g} s'}"
        return ""


class Answer(msgspec.Struct, frozen=True):
    """Answer of a path."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON

    @classmethod
    def of(cls, content: object, status: HTTPStatus = HTTPStatus.OK) -> Answer:
        """Return an answer with ``content`` as JSON."""
        return cls(msgspec.json.encode(content), status)


Answers = Mapping[str, Callable[[], Awaitable[Answer]]]


class HttpServer:
    """Server that listens from its creation, and answers from ``start`` to ``close``.

    Args:
        port: 0 chooses a free one.

    Raises:
        ConfigurationError: the address cannot be used; says why.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler, ":" in host)
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0].rstrip(".")
            raise ConfigurationError(
                f"cannot listen on --metrics-host {shown(host)}, --metrics-port {port} ({reason}); pass others"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        """URL of the listener."""
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"

    def start(self, answers: Answers) -> None:
        """Answer paths with the results of their functions, called in the running event loop."""
        self._server.answers, self._server.loop = answers, asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop listening, without waiting for answers that are being written."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    # A slow reader must not keep the process from ending.
    daemon_threads = True
    allow_reuse_port = False
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], is_ipv6: bool) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        self.answers: Answers = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # Skips HTTPServer's method, which asks the name service for the host's name and may take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect before the answer."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_PATIENCE_S

    def do_GET(self) -> None:
        answer = self._answer()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def _answer(self) -> Answer:
        server, path = self.server, self.path.partition("?")[0]
        assert isinstance(server, _Server)
        answer, loop = server.answers.get(path), server.loop
        if answer is None or loop is None:
            error = {"error": f"no path {shown(path)}; available: {', '.join(server.answers)}"}
            return Answer.of(error, HTTPStatus.NOT_FOUND)
        answering = _awaited(answer)
        try:
            future = asyncio.run_coroutine_threadsafe(answering, loop)
        except RuntimeError:  # the loop has ended, and the process is about to
            answering.close()
            return Answer.of({"error": "the process ends"}, HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            return future.result(LOOP_PATIENCE_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            error = {"error": f"no answer within {LOOP_PATIENCE_S:g} s: the event loop does not run, or is overloaded"}
            return Answer.of(error, HTTPStatus.SERVICE_UNAVAILABLE)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because scrapes are frequent."""


async def _awaited(answer: Callable[[], Awaitable[Answer]]) -> Answer:
    return await answer()
