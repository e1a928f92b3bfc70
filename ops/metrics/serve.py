"""The process of ``penstock metrics``."""

from __future__ import annotations

import asyncio
from functools import partial

from ...producer.web.server import announce, listening, serve_app, web_config
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
    """Serve until SIGTERM or SIGINT, and return 0. Serving starts and continues while Redis is unreachable.

    Raises:
        ConfigurationError: the address cannot be listened on, or a URL cannot be read.
    """
    snapshot = Snapshot(redis_url, parse_shards(shards), Keys(namespace), options, refresh_s=refresh_s)
    app = build_app(snapshot, names)
    config = web_config(app, shutdown_timeout_s=SHUTDOWN_S)
    with listening(host, port) as listener, asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve_app(app, config, listener, partial(announce, listener, "/metrics")))
    return 0
