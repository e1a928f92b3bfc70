"""Redis URLs: read with redis-py's own rules (``sentinel.py`` has those of Sentinels), shown without passwords."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import ConnectionPool

from ..errors import ConfigurationError
from ..shown import shown
from . import sentinel

try:
    from redis.driver_info import DriverInfo  # type: ignore[import-not-found]  # redis-py has it from 7.2 on
except ImportError:
    DriverInfo = None

CLUSTER_SCHEMES = ("redis+cluster://", "rediss+cluster://")
SCHEMES = ("redis://", "rediss://", "unix://", *sentinel.SCHEMES)

# From 7.2 on redis-py looks on the disk for its own version at every connection, in the event loop, unless it is told.
_DRIVER: dict[str, Any] = {} if DriverInfo is None else {"driver_info": DriverInfo()}


def mask_url(url: str) -> str:
    """Return ``url`` with its password replaced by ``***``, fit for logs and errors."""
    if url.startswith((*sentinel.SCHEMES, *CLUSTER_SCHEMES)):
        # Several hosts are more than urlsplit understands.
        url = re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:***@", url, count=1)
    else:
        try:
            password = urlsplit(url).password
        except ValueError:
            return "(unreadable)"
        if password is not None:
            url = url.replace(f":{password}@", ":***@", 1)
    # redis-py takes the password from the query, too.
    return re.sub(r"([?&](?:sentinel_)?password=)[^&]*", r"\1***", url)


def _host_check(url: str) -> dict[str, bool]:
    """Whose certificate it is is verified as well as who signed it, which redis-py does from 6.0 on. The URL's
    ``ssl_check_hostname`` and ``ssl_cert_reqs`` have the last word."""
    verifies = url.startswith("rediss://") and not re.search(r"[?&]ssl_cert_reqs=(none|optional)", url)
    return {"ssl_check_hostname": True} if verifies else {}


def parse_pool(url: str, **options: Any) -> ConnectionPool:
    """Return a pool whose ``make_connection()`` opens connections to ``url``; nothing is opened yet.

    Keep the pool for as long as its connections, which ask it where the primary is if the URL names Sentinels.

    Raises:
        ConfigurationError: the URL has another scheme than those, or cannot be read.
    """
    if isinstance(url, str) and url.startswith(CLUSTER_SCHEMES):
        raise ConfigurationError(
            f"the home Redis cannot be a cluster, which holds models only: name {shown(mask_url(url))} in "
            "PENSTOCK_SHARDS, and give the URL of a server, or of Sentinels, for jobs, batches and what else "
            "belongs to no model"
        )
    if not isinstance(url, str) or not url.startswith(SCHEMES):
        raise ConfigurationError(
            f"the Redis URL must begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, got {shown(mask_url(str(url)))}"
        )
    try:
        # RESP2, where a subscription's messages are replies like others; redis-py 8 would speak RESP3 by default.
        make_pool = sentinel.sentinel_pool if url.startswith(sentinel.SCHEMES) else ConnectionPool.from_url
        return make_pool(url, protocol=2, **_DRIVER, **_host_check(url), **options)
    except ValueError as error:
        raise ConfigurationError(f"the Redis URL {shown(mask_url(url))} cannot be read: {error}") from error
