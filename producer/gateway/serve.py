"""Run the gateway as a process: uvicorn around the application, one line when it is ready, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ...shared.process.log import get_logger
from ...shared.shards import check_servers
from ..web.server import announce, listening, serve_app, web_config
from .app import build_app
from .cors import ANY
from .settings import GatewaySettings

# Appended to the address in the line that announces the gateway, since OpenAI's clients take it as base_url.
PATH = "/v1"

log = get_logger(__name__)


def serve(settings: GatewaySettings, *, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT. Then accept nothing more, let running answers end up to the time limit, and return
    0.

    Raises:
        ConfigurationError: the address cannot be listened on, Redis is unreachable, or the folder cannot be used.
    """
    app = build_app(settings)
    config = _config(app, settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, is_service=True))
        with listening(host, port) as listener:
            warn_if_exposed(settings, *listener.getsockname()[:2])
            runner.run(serve_app(app, config, listener, partial(announce, listener, PATH)))
    return 0


async def serve_on(
    settings: GatewaySettings, listener: socket.socket, on_ready: Callable[[], None], **parts: Any
) -> None:
    """Serve on the caller's listening socket, as one of several processes. Passes ``parts`` to ``build_app``."""
    app = build_app(settings, **parts)
    await serve_app(app, _config(app, settings), listener, on_ready)


def _config(app: Starlette, settings: GatewaySettings) -> uvicorn.Config:
    return web_config(
        app,
        shutdown_timeout_s=int(settings.shutdown_timeout_s),
        request_timeout_s=settings.request_timeout_s,
        keep_alive_timeout_s=settings.keep_alive_timeout_s,
    )


def warn_if_exposed(settings: GatewaySettings, address: str, port: int) -> None:
    """Log a warning if a gateway without API keys can be used by others at ``address``."""
    if settings.api_keys:
        return
    if not ipaddress.ip_address(address).is_loopback:
        log.warning(
            "open_without_api_keys",
            address=address,
            port=port,
            tenant=settings.tenant,
            reason="API keys are off",
            remedy="pass --api-keys on or --host 127.0.0.1, or put a proxy that authenticates callers in front",
        )
    if ANY in settings.cors_origins:
        log.warning(
            "open_to_all_web_pages",
            reason="API keys are off, and --cors-origin is '*'",
            remedy="pass --api-keys on, or the origins of your pages",
        )
