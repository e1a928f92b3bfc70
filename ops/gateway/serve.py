"""The gateway as a process: uvicorn around the application, one line when it is ready, an end in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from ...shared.errors import ConfigurationError
from ...shared.redis_check import check_redis
from .app import build_app
from .connection import connection_class
from .settings import GatewaySettings

# Waiting connections on top of those that run.
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Prints where it listens, and ends with status 0 on a signal, which uvicorn would raise again."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            print(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """The first signal ends in order, a second one at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(settings: GatewaySettings, *, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT: then accept no more, let running answers end up to the time limit, and return 0.

    Raises:
        ConfigurationError: the address cannot be listened on, or Redis is not there.
    """
    connection = connection_class(
        request_timeout_s=settings.request_timeout_s, keep_alive_timeout_s=settings.keep_alive_timeout_s
    )
    config = uvicorn.Config(
        build_app(settings),
        http=connection,  # pyright: ignore[reportArgumentType]  # it calls it, and asks for nothing of a class
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s),
        ws="none",
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(check_redis(settings.redis_url, namespace=settings.namespace))
        with _listening(host, port) as listener:
            runner.run(_Server(config).serve([listener]))
    return 0


@contextmanager
def _listening(host: str, port: int) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on host {host!r}, port {port}: {error}") from error
    with listener:
        yield listener
