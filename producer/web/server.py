"""Run a web application as a process: its socket, one line when it is ready, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ...shared.errors import ConfigurationError
from ...shared.process import service_manager
from ...shared.process.command_line import print_if_read
from ...shared.values.shown import shown
from .connection import KEEP_ALIVE_TIMEOUT_S, REQUEST_TIMEOUT_S, connection_class

# Connections that wait to be accepted.
BACKLOG = 2048


class WebServer(uvicorn.Server):
    """Server that reports when it is ready, and shuts down gracefully on a signal, which uvicorn would raise again."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._shut_down)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _shut_down(self) -> None:
        """Shut down: gracefully at the first signal, immediately at the second."""
        service_manager.tell_stopping()
        self.force_exit = self.should_exit
        self.should_exit = True


def web_config(
    app: Starlette,
    *,
    shutdown_timeout_s: int,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    keep_alive_timeout_s: float = KEEP_ALIVE_TIMEOUT_S,
    **options: Any,
) -> uvicorn.Config:
    """Return the configuration with which uvicorn serves an application.

    Args:
        shutdown_timeout_s: how long running answers may take to end after a signal.
        request_timeout_s, keep_alive_timeout_s: as for ``LimitedConnection``.
        options: further options of uvicorn's ``Config``.
    """
    connection = connection_class(request_timeout_s=request_timeout_s, keep_alive_timeout_s=keep_alive_timeout_s)
    return uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]  # uvicorn only calls it
        lifespan="off",  # started by ``serve_app``, since uvicorn would log a traceback of a plain error
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=shutdown_timeout_s,
        ws="none",
        **options,
    )


async def serve_app(
    app: Starlette, config: uvicorn.Config, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Start the application, serve it until a signal arrives, and stop it."""
    async with app.router.lifespan_context(app), service_manager.watched():
        await WebServer(config, on_ready).serve([listener])


def announce(listener: socket.socket, path: str = "") -> None:
    """Print the line with the address followed by ``path``, and notify the service manager."""
    host, port = listener.getsockname()[:2]
    line = f"ready: http://{f'[{host}]' if ':' in host else host}:{port}{path}"
    print_if_read(line)
    service_manager.tell_ready(line)


@contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """Listen on an address; port 0 selects a free port. The host ``::`` also accepts IPv4.

    Raises:
        ConfigurationError: listening fails; the message has the reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual_stack = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual_stack)
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0].rstrip(".")
        raise ConfigurationError(
            f"cannot listen on host {shown(host)}, port {port} ({reason}); pass another --host or --port"
        ) from error
    with listener:
        yield listener
