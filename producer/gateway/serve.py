"""The gateway as a process: uvicorn around the application, one line when it is ready, an end in order."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ...shared.log import get_logger
from ...shared.shards import check_servers
from ..web.server import announce, listening, serve_app, web_config
from .access.cors import ANY
from .app import build_app
from .settings import GatewaySettings

# Behind the address in the line that says where it serves: what OpenAI's clients take as base_url.
PATH = "/v1"

log = get_logger(__name__)


def serve(settings: GatewaySettings, *, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT: then accept no more, let running answers end up to the time limit, and return 0.

    Raises:
        ConfigurationError: the address cannot be listened on, Redis is not there, or the folder cannot be used.
    """
    app = build_app(settings)
    config = _config(app, settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, is_service=True))
        with listening(host, port) as listener:
            warn_of_strangers(settings, *listener.getsockname()[:2])
            runner.run(serve_app(app, config, listener, partial(announce, listener, PATH)))
    return 0


async def serve_on(
    settings: GatewaySettings, listener: socket.socket, on_ready: Callable[[], None], **parts: Any
) -> None:
    """Serve on a socket that somebody else listens with, as one of several; ``parts`` are those of ``build_app``."""
    app = build_app(settings, **parts)
    await serve_app(app, _config(app, settings), listener, on_ready)


def _config(app: Starlette, settings: GatewaySettings) -> uvicorn.Config:
    return web_config(
        app,
        shutdown_timeout_s=int(settings.shutdown_timeout_s),
        request_timeout_s=settings.request_timeout_s,
        keep_alive_timeout_s=settings.keep_alive_timeout_s,
    )


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
