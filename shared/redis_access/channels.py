"""Channels of one database of a Redis server.

Redis delivers a message to the subscribers of all databases. Deployments in two databases must stay separate, so
the names of their channels differ. Only the connections know the database, so the names are changed there: in commands,
in subscriptions, and in the scripts, which publish ``prefix .. NAME``. Nothing is changed in database 0.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec
from redis.asyncio.connection import ConnectionPool

from ..keys import channel_in, lua_channel_prefix_in

# Index of the first channel among the arguments. In a cluster the words are those of sharded channels.
_CHANNEL_AT = {"PUBLISH": 1, "SPUBLISH": 1, "PUBSUB": 2}
_IN_SCRIPTS = re.compile(r"('S?PUBLISH'|'(?:SHARD)?NUMSUB'), prefix\b")


class DatabaseChannels:
    """Names of channels in the database to which the connections of a pool belong."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.database = int(pool.connection_kwargs.get("db") or 0)
        self._scripts: dict[str, Any] = {}

    def in_command(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a command with the names that its channels have in this database."""
        place = _CHANNEL_AT.get(args[0]) if self.database else None
        if place is None:
            return args
        return (*args[:place], channel_in(self.database, args[place]), *args[place + 1 :])

    def in_script(self, script: Any) -> Any:
        """Return a script (with ``text`` and ``sha``) that publishes in this database."""
        if not self.database:
            return script
        if script.sha not in self._scripts:
            text = _IN_SCRIPTS.sub(rf"\1, {lua_channel_prefix_in(self.database)}", script.text)
            sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            self._scripts[script.sha] = msgspec.structs.replace(script, text=text, sha=sha)
        return self._scripts[script.sha]

    def in_subscription(self, channel: bytes) -> bytes:
        """Return the name of a channel to subscribe to."""
        return channel_in(self.database, channel.decode()).encode() if self.database else channel
