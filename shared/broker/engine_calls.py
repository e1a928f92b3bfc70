"""What an engine exchanges through Redis besides claims: control calls, and the adapters that it has loaded.

A call goes to the channel on which its engine receives cancellations. The reply goes to a channel of the call, to which
its caller has subscribed before, and into a key, which the caller reads if the channel or the connection failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..connection import CommandConnection
from ..control.calls import ControlCommand, ControlReply
from ..keys import ModelKeys
from ..redis_access.link import in_parts
from .script import run_script

REPLY_TTL_MS = 60_000
_encoder = msgspec.msgpack.Encoder()
# Reported again after a third of this time, so that a Redis that lost it, or a new partition, gets it soon.
LOADED_TTL_MS = 30_000


class EngineCalls:
    """The control calls of one model's engines.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self.keys = keys

    async def now_ms(self) -> int:
        """Return the time by the clock of Redis, which callers and engines share."""
        seconds, microseconds = await self._connection.execute("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def send(self, engine_id: str, command: ControlCommand) -> None:
        """Send a call to an engine, if it listens. A repeated call is the same call."""
        await self._connection.execute("PUBLISH", self.keys.engine_commands(engine_id), _encoder.encode(command))

    async def reply(self, reply: ControlReply) -> None:
        """Answer a call. A second call has no effect."""
        data = _encoder.encode(reply)
        key = self.keys.call_reply(reply.call_id, reply.engine_id)
        # The key first, so that a caller that missed the message can read it.
        await self._connection.execute("SET", key, data, "PX", REPLY_TTL_MS)
        await self._connection.execute("PUBLISH", self.keys.call_replies(reply.call_id), data)

    async def read_replies(self, call_id: str, engine_ids: Sequence[str]) -> list[bytes]:
        """Return the existing replies, encoded."""
        keys = [self.keys.call_reply(call_id, engine_id) for engine_id in engine_ids]
        answers = [data for part in in_parts(keys) for data in await self._connection.execute("MGET", *part)]
        return [data for data in answers if data is not None]


async def report_loaded(
    connection: CommandConnection,
    keys: ModelKeys,
    engine_id: str,
    digests: Iterable[str],
    *,
    ttl_ms: int = LOADED_TTL_MS,
) -> None:
    """Report that an engine has loaded these adapters, and no others, for ``ttl_ms`` from now on.

    Raises ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """
    await run_script(connection, keys, "set_adapters", [keys.leases], [engine_id, ttl_ms, *digests])
