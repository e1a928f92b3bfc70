"""The gateway as a process: uvicorn around the application, one line when it is ready, an end in order."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import structlog
import uvicorn
from starlette.applications import Starlette

from ...shared.shards import check_servers
from ..web_server import BACKLOG, WebServer, listening
from .app import build_app
from .connection import connection_class
from .cors import ANY
from .settings import GatewaySettings

log = structlog.get_logger()


def serve(settings: GatewaySettings, *, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT: then accept no more, let running answers end up to the time limit, and return 0.

    Raises:
        ConfigurationError: the address cannot be listened on, Redis is not there, or the folder cannot be used.
    """
    app = build_app(settings)
    connection = connection_class(
        request_timeout_s=settings.request_timeout_s, keep_alive_timeout_s=settings.keep_alive_timeout_s
    )
    config = uvicorn.Config(
        app,
        http=connection,  # pyright: ignore[reportArgumentType]  # it calls it, and asks for nothing of a class
        lifespan="off",  # begun below: uvicorn would log a traceback of what is a sentence
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s),
        ws="none",
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(check_servers(settings.redis_url, settings.shards, namespace=settings.namespace))
        with listening(host, port) as listener:
            warn_of_strangers(settings, *listener.getsockname()[:2])
            runner.run(_serve(app, config, listener))
    return 0


async def _serve(app: Starlette, config: uvicorn.Config, listener: socket.socket) -> None:
    async with app.router.lifespan_context(app):
        await WebServer(config, "/v1").serve([listener])


def warn_of_strangers(settings: GatewaySettings, address: str, port: int) -> None:
    """Log who can use a gateway without API keys at ``address``, if those are others than who started it."""
    if settings.api_keys:
        return
    if not ipaddress.ip_address(address).is_loopback:
        log.warning(
            "open_to_whoever_reaches_it",
            address=address,
            port=port,
            tenant=settings.tenant,
            reason="API keys are off",
            remedy="pass --api-keys on, or --host 127.0.0.1, or let nobody through but what asks who it is",
        )
    if ANY in settings.cors_origins:
        log.warning(
            "open_to_every_web_page",
            reason="API keys are off, and --cors-origin is '*'",
            remedy="pass --api-keys on, or the origins of your pages",
        )
