"""A temporary Redis for a benchmark, removed with all its data when the ``with`` block ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from ...shared.redis_access.embedded import EmbeddedRedis
from .life_line import unwind_on_sigterm


@contextmanager
def private_redis(*, append_only: bool) -> Iterator[str]:
    """Yield the URL of a server on a unix socket.

    Args:
        append_only: write the append-only file every second, as a deployment does; False for memory only.
    """
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, EmbeddedRedis.start(Path(folder)) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendonly", "yes" if append_only else "no")
            # A rewrite would fork and use a core during measurements.
            client.config_set("auto-aof-rewrite-percentage", 0)
        yield server.url
