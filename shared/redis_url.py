"""Redis URLs: read with redis-py's own rules, and shown without their password."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio.connection import ConnectionPool

from .errors import ConfigurationError

SCHEMES = ("redis", "rediss", "unix")


def mask_url(url: str) -> str:
    """Return ``url`` with its password replaced by ``***``, fit for logs and errors."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")))


def parse_pool(url: str, **options: Any) -> ConnectionPool:
    """Return a pool whose ``make_connection()`` opens connections to ``url``; nothing is opened yet.

    Raises:
        ConfigurationError: the URL has another scheme than redis, rediss or unix, or cannot be read.
    """
    if not isinstance(url, str) or urlsplit(url).scheme not in SCHEMES:
        raise ConfigurationError(
            f"the Redis URL must begin with redis://, rediss:// or unix://, got {mask_url(str(url))!r}"
        )
    try:
        return ConnectionPool.from_url(url, **options)
    except ValueError as error:
        raise ConfigurationError(f"the Redis URL {mask_url(url)!r} cannot be read: {error}") from error
