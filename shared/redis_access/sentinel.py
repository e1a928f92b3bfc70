"""A primary that Sentinels name: its URL, and a pool whose connections lead to the current primary.

    redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DB?option=value

User, password, database and options are those of the servers, as in any Redis URL. ``rediss+sentinel`` speaks TLS with
servers and Sentinels alike. ``sentinel_username`` and ``sentinel_password`` are for Sentinels that ask for them.

Source: Redis documentation, "Guidelines for Redis clients with support for Redis Sentinel".
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT = 26379
# Of those that are asked in turn some may be stopped, or cut off: all of three fit into the time for connecting.
ASK_TIMEOUT_S = 1.0
# While there is no primary, each connection asks again and again.
ASK_EVERY_S = 0.2

_URL = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^@/?]+)/(?P<name>[^@/?]+)(?:/(?P<db>\d+))?/?"
    r"(?:\?(?P<query>.*))?"
)
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")


class AddressError(ValueError):
    """The URL does not have the form of one with Sentinels."""


class _OfPrimary:
    """Mixed into connections: a Sentinel may still name a server that has been the primary, and is a replica now.

    Writes are refused there, but what is read there is old: a request that is under way would seem unknown.
    """

    async def connect_to(self, address: Any) -> None:
        connection: Any = self
        await super().connect_to(address)  # type: ignore[misc]  # of the connection that this is mixed into
        await connection.send_command("INFO", "replication")
        if b"role:master" not in await connection.read_response(disable_decoding=True):
            await connection.disconnect(nowait=True)
            raise RedisConnectionError(f"{address[0]}:{address[1]} is no primary any more")


class _Connection(_OfPrimary, SentinelManagedConnection):
    pass


class _SSLConnection(_OfPrimary, SentinelManagedSSLConnection):
    pass


class PrimaryPool(SentinelConnectionPool):
    """A pool whose connections ask the Sentinels, each time that they connect, where the primary is."""

    def __init__(self, service_name: str, sentinel_manager: Sentinel, **options: Any) -> None:
        super().__init__(service_name, sentinel_manager, **options)
        self._asked_at = -ASK_EVERY_S

    async def get_master_address(self) -> Any:
        """Return (host, port) of the primary, by the word of the first Sentinel that answers.

        Raises:
            redis.sentinel.MasterNotFoundError: none answers that knows a live primary of that name.
        """
        await asyncio.sleep(self._asked_at + ASK_EVERY_S - time.monotonic())
        self._asked_at = time.monotonic()
        try:
            return await super().get_master_address()
        finally:
            # Failovers are rare: an open connection to each Sentinel would be of no use meanwhile.
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect()


def sentinel_pool(url: str, **options: Any) -> PrimaryPool:
    """Return a pool of connections to the primary that ``url`` means; nothing is opened yet.

    Args:
        options: options of the connections, instead of the URL's.

    Raises:
        AddressError: the URL cannot be read; the message quotes no part of it.
        ValueError: redis-py cannot read an option.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise AddressError("it must be redis+sentinel://HOST:PORT,HOST:PORT,.../NAME or .../NAME/DB")
    query = parse_qsl(match["query"] or "", keep_blank_values=True)
    own = {name: value for name, value in query if name.startswith("sentinel_")}
    others = urlencode([(name, value) for name, value in query if name not in own])
    # redis-py reads all that the URL of a server may say, too.
    user = "" if match["user"] is None else f"{match['user']}@"
    like = ConnectionPool.from_url(f"{match['scheme']}://{user}server/{match['db'] or 0}?{others}", **options)
    kwargs = {name: value for name, value in like.connection_kwargs.items() if name not in ("host", "port")}
    is_encrypted = issubclass(like.connection_class, SSLConnection)
    sentinel = Sentinel(
        [_address(part) for part in match["hosts"].split(",")],
        sentinel_kwargs={
            "username": own.get("sentinel_username"),
            "password": own.get("sentinel_password"),
            "protocol": 2,
            "socket_timeout": ASK_TIMEOUT_S,
            "socket_connect_timeout": ASK_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            "ssl": is_encrypted,
            **{name: value for name, value in kwargs.items() if name.startswith("ssl_")},
        },
    )
    kwargs["connection_class"] = _SSLConnection if is_encrypted else _Connection
    return PrimaryPool(unquote(match["name"]), sentinel, ssl=is_encrypted, **kwargs)


def _address(text: str) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if match is None:
        raise AddressError("each Sentinel must be HOST:PORT")
    return match["host"].strip("[]"), int(match["port"] or DEFAULT_PORT)
