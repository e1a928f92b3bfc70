"""The node of a Redis cluster that serves a key, as the nodes report it, and the key of a command.

    redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT?option=value

User, password and options are those of all nodes; any of them is asked for the others. ``rediss+cluster`` speaks TLS.

Source: Redis cluster specification, "Keys distribution model" and "MOVED Redirection".
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from ..redis_access.link import LOST, close_connection, make_pool, open_connection
from ..redis_access.url import CLUSTER_SCHEMES, check_options, unreadable
from ..values.shown import mask_url

NUM_SLOTS = 16384
DEFAULT_PORT = 6379
# While a node fails over, everybody asks again and again.
ASK_EVERY_S = 0.1
ASK_TIMEOUT_S = 2.0
_URL = re.compile(r"(?P<scheme>rediss?)\+cluster://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^@/?]+)/?(?:\?(?P<query>.*))?")
# redis-py takes the code away where it has a class for it, as it has for ASK, which says no such thing.
_MOVED = re.compile(r"^(?:MOVED )?(?P<slot>\d+) (?P<host>\S+):(?P<port>\d+)$")
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d+))?")
# EVALSHA sha numkeys key…: without keys the first argument, which is a prefix. PUBSUB NUMSUB channel.
_PLACES = {"EVAL": 3, "EVALSHA": 3, "PUBSUB": 2}


def is_cluster_url(url: str) -> bool:
    return url.startswith(CLUSTER_SCHEMES)


class Topology:
    """Topology of one cluster; read again after a redirect, or when a node is lost.

    Raises:
        ConfigurationError: the URL cannot be read.

    Attributes:
        on_change: called when slots are served by other nodes than before.
        has_sharded_channels: whether messages stay at the node that has the slot of their channel (Redis 7).
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        hosts = [_HOST.fullmatch(part) for part in match["hosts"].split(",")] if match else [None]
        if match is None or None in hosts:
            raise unreadable(url, "it must be redis+cluster://HOST:PORT,HOST:PORT,...")
        check_options(url)
        self.shown_url = mask_url(url)
        self._like = (match["scheme"], "" if match["user"] is None else f"{match['user']}@", match["query"])
        self._seeds = [self._node_url(host["host"], int(host["port"] or DEFAULT_PORT)) for host in hosts if host]
        for seed in self._seeds:
            make_pool(seed)
        self._node_of_slot: list[str] = []
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -ASK_EVERY_S
        self.on_change: list[Callable[[], None]] = []
        self.has_sharded_channels = False

    @property
    def seed(self) -> str:
        """URL of the first node that was named."""
        return self._seeds[0]

    @property
    def nodes(self) -> list[str]:
        """URLs of the primaries that are known, in the order of their slots."""
        return [*dict.fromkeys(filter(None, self._node_of_slot))]

    def node_of(self, key: str | None) -> str | None:
        """Return the URL of the node that serves a key, of any where there is none; None if that is not known."""
        if not self._node_of_slot:
            return None
        return (self.nodes or [None])[0] if key is None else self._node_of_slot[key_slot(key.encode())] or None

    async def ask(self) -> None:
        """Read the topology from the nodes; concurrent calls share one answer.

        Raises:
            redis.exceptions.ConnectionError: no node answers.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_nodes())
            # Heard even if all who wait for it are cancelled meanwhile.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._asking)

    def note_moved(self, error: Exception) -> bool:
        """Take a node's word of who serves a slot, which others may not have heard yet; False if it is no such word."""
        match = _MOVED.search(str(error))
        if match is None or not self._node_of_slot:
            return False
        slot, url = int(match["slot"]), self._node_url(match["host"], int(match["port"]))
        if self._node_of_slot[slot] != url:
            self._node_of_slot[slot] = url
            for tell in self.on_change:
                tell()
        return True

    async def _ask_nodes(self) -> None:
        await asyncio.sleep(self._asked_at + ASK_EVERY_S - time.monotonic())
        reasons: list[str] = []
        try:
            for url in dict.fromkeys((*self.nodes, *self._seeds)):
                try:
                    async with asyncio.timeout(ASK_TIMEOUT_S):
                        rows = await _ask_node(url)
                except (*LOST, TimeoutError, ResponseError) as error:
                    reasons.append(f"{mask_url(url)}: {error or type(error).__name__}")
                else:
                    self._use_slots(rows, url)
                    return
        finally:
            self._asked_at = time.monotonic()
        raise RedisConnectionError(f"no node of the cluster answers; {'; '.join(reasons)}")

    def _use_slots(self, rows: list[Any], asked: str) -> None:
        node_of_slot = [""] * NUM_SLOTS
        for first, last, primary, *_ in rows:
            host, port = primary[0], primary[1]
            # A node that does not know its own address has the one under which it was asked.
            url = self._node_url(host.decode(), port) if host and host != b"?" else asked
            node_of_slot[first : last + 1] = [url] * (last + 1 - first)
            # From version 7 on, which brought sharded channels, a node has a fourth field.
            self.has_sharded_channels = len(primary) > 3
        has_changed, self._node_of_slot = node_of_slot != self._node_of_slot, node_of_slot
        if has_changed:
            for tell in self.on_change:
                tell()

    def _node_url(self, host: str, port: int) -> str:
        scheme, user, query = self._like
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{scheme}://{user}{host}:{port}" + (f"?{query}" if query else "")


async def _ask_node(url: str) -> list[Any]:
    connection: AbstractConnection = await open_connection(make_pool(url))
    try:
        await connection.send_command("CLUSTER", "SLOTS")
        rows: Any = await connection.read_response()
        return rows
    finally:
        await close_connection(connection)


def routing_key(args: tuple[Any, ...]) -> str | None:
    """Return the key or channel that says which model a command is of; None if it names none."""
    place = _PLACES.get(args[0], 1)
    key = args[place] if len(args) > place else None
    return key.decode(errors="replace") if isinstance(key, bytes) else key if isinstance(key, str) else None
