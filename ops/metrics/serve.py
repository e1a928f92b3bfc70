"""The exporter as a process."""

from __future__ import annotations

import asyncio

import uvicorn

from ...producer.web_server import BACKLOG, WebServer, listening
from ...shared.keys import Keys
from ...shared.metrics.exposition import MetricNames
from ...shared.shards import ShardsArgument, parse_shards
from .app import build_app
from .snapshot import Snapshot
from .wanted import WantedOptions

SHUTDOWN_S = 2


def serve(
    redis_url: str,
    *,
    host: str,
    port: int,
    namespace: str,
    shards: ShardsArgument,
    names: MetricNames,
    options: WantedOptions,
    refresh_s: float,
) -> int:
    """Serve until SIGTERM or SIGINT, and return 0. It begins, and goes on, while Redis is away, and says so.

    Raises:
        ConfigurationError: the address cannot be listened on, or a URL cannot be read.
    """
    snapshot = Snapshot(redis_url, parse_shards(shards), Keys(namespace), options, refresh_s=refresh_s)
    app = build_app(snapshot, names)
    config = uvicorn.Config(
        app,
        lifespan="off",  # begun below: uvicorn would log a traceback of what is a sentence
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ws="none",
    )

    async def run() -> None:
        async with app.router.lifespan_context(app):
            await WebServer(config, "/metrics").serve([listener])

    with listening(host, port) as listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    return 0
