"""A connection whose scripts run in virtual time.

It replaces the ``CommandConnection`` of ``Broker`` and ``Queue``, so they send the same commands as for engines and
clients. Their coroutines never wait on it: a command returns its reply synchronously.
"""

from __future__ import annotations

from collections.abc import Coroutine
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError

from ...shared.broker import SCRIPTS, Script
from ...shared.connection import CommandConnection
from ...shared.errors import BrokerError
from ...shared.keys import ModelKeys
from ...shared.redis_access.script import script_of

T = TypeVar("T")
# Time at which every simulation starts (2026-01-01), so that results that depend on it are reproducible.
EPOCH_US = 1_767_225_600_000_000
EXPIRE_AT_ONCE = 1000


def virtual_script(script: Script) -> Script:
    """Return a script that runs under the simulator's clock. It returns its published channels, then its result."""
    prelude = (resources.files(__name__.rpartition(".")[0]) / "virtual_time.lua").read_text()
    text = f"{prelude}local function run()\n{script.text}\nend\nreturn {{published, run()}}\n"
    return script_of(script.name, text)


class VirtualConnection(CommandConnection):
    """Connection that runs commands and scripts at ``now_us``, one after the other over one reliable socket.

    ``published`` collects the channels that scripts publish to, until the caller removes them. ``num_calls`` counts
    scripts by name.
    """

    def __init__(self, url: str, keys: ModelKeys) -> None:
        super().__init__(url)
        self._keys = keys
        self._client = redis.Redis.from_url(url, single_connection_client=True, protocol=2)
        self._client.ping()
        self._scripts = {name: virtual_script(script) for name, script in SCRIPTS.items()}
        for script in self._scripts.values():
            self._client.script_load(script.text)
        self._told_us = -1
        self.now_us = EPOCH_US
        self.published: list[str] = []
        self.num_calls: dict[str, int] = {}

    async def execute(self, *args: Any, **how: bool) -> Any:
        """Run one command, under the server's own clock."""
        return self._exchange([args])

    async def run_script(self, script: Any, keys: list[str], args: list[Any], **how: bool) -> Any:
        """Run a script in virtual time, and collect the channels that it publishes to."""
        self.num_calls[script.name] = self.num_calls.get(script.name, 0) + 1
        commands: list[tuple[Any, ...]] = []
        if self._told_us != self.now_us:
            commands.append(("HSET", self._keys.virtual, "now_us", self.now_us))
            self._told_us = self.now_us
        commands.append(("EVALSHA", self._scripts[script.name].sha, len(keys), *keys, *args))
        published, *reply = self._exchange(commands)
        self.published += [channel.decode() for channel in published]
        return reply[0] if reply else None

    def expire(self) -> None:
        """Delete keys that have expired by now."""
        now_ms = self.now_us // 1000
        while keys := self._exchange(
            [("ZRANGEBYSCORE", self._keys.expiries, "-inf", now_ms, "LIMIT", 0, EXPIRE_AT_ONCE)]
        ):
            self._exchange([("UNLINK", *keys), ("ZREM", self._keys.expiries, *keys)])

    async def close(self) -> None:
        self._client.close()
        await super().close()

    def _exchange(self, commands: list[tuple[Any, ...]]) -> Any:
        """Return the last reply; raise the first error."""
        connection = self._client.connection
        assert connection is not None
        connection.send_packed_command(connection.pack_commands(commands))
        replies: list[Any] = []
        errors: list[ResponseError] = []
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:  # read on: the next reply belongs to the next command
                errors.append(error)
        if errors:
            raise errors[0]
        return replies[-1]


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of ``Broker`` or ``Queue`` on a ``VirtualConnection``, and return its result.

    Raises:
        BrokerError: the coroutine waits, although no event loop runs here.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise BrokerError("a call of the simulator must not wait")
