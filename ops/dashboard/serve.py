"""The process of ``penstock dashboard``."""

from __future__ import annotations

import asyncio
import ipaddress
from functools import partial

from ...producer.control.usage import Prices
from ...producer.web.server import announce, listening, serve_app, web_config
from ...shared.errors import ConfigurationError
from ...shared.shards import ShardsArgument, check_servers
from .access import Resolve
from .app import dashboard

# Streams of tabs do not end by themselves.
SHUTDOWN_S = 2
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def serve(
    redis_url: str,
    *,
    host: str,
    port: int,
    namespace: str,
    shards: ShardsArgument = None,
    access: Resolve | None,
    is_open: bool = False,
    prices: Prices | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, and return 0.

    Args:
        access, prices: as of ``dashboard``.
        is_open: whether ``access`` lets in all requests; then the pages are served to this machine only.

    Raises:
        ConfigurationError: the address cannot be listened on, or is reachable from other hosts without authentication;
            or Redis is unreachable.
    """
    with listening(host, port) as listener:
        address = listener.getsockname()[0]
        if is_open and not ipaddress.ip_address(address).is_loopback:
            raise ConfigurationError(
                f"the dashboard does not listen on {host} without authentication; pass --keys on (`penstock operator "
                "create` creates keys), --auth-header NAME behind a proxy, or --host 127.0.0.1"
            )
        hosts = LOCAL_NAMES if is_open else ()
        app = dashboard(redis_url, access=access, namespace=namespace, shards=shards, hosts=hosts, prices=prices)
        # Only --auth-header decides which proxies are trusted.
        config = web_config(app, shutdown_timeout_s=SHUTDOWN_S, proxy_headers=False)

        async def run() -> None:
            await check_servers(redis_url, shards, namespace=namespace)
            await serve_app(app, config, listener, partial(announce, listener))

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(run())
    return 0
