"""One model's part of the broker, as methods."""

from __future__ import annotations

from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import BrokerError
from ..keys import GROUP, ModelKeys
from ..messages import Delta, FinishReason
from .script import SCRIPTS

_encoder = msgspec.msgpack.Encoder()
_delta_decoder = msgspec.msgpack.Decoder(Delta)

NEW = "new"

# Verdicts of append and finish.
REFUSED, WRITTEN, REPEATED = 0, 1, 2

_STATE_OF = {
    FinishReason.ERROR: "failed",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "expired",
    FinishReason.POISONED: "parked",
}


class Claim(msgspec.Struct, frozen=True):
    """A request handed to an engine. ``payload`` is undecoded: it may be anything."""

    request_id: str
    payload: bytes
    epoch: int
    num_logged_tokens: int
    attempt: int


class Record(msgspec.Struct, gc=False):
    """A delta to append under a claim's epoch."""

    request_id: str
    epoch: int
    delta: Delta


class FinalRecord(Record, gc=False):
    """The last delta of a request; it carries ``finish_reason``."""


class Broker:
    """Enqueue, claim, append, finish, cancel and release for the requests of one model.

    All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self.keys = keys

    async def enqueue(self, request_id: str, payload: bytes, *, result_ttl_ms: int, detached: bool) -> str:
        """Put an encoded request into the lane, unless its id is known: then nothing changes.

        Returns ``NEW``, or the state of the request that already has the id.
        """
        state = await self._run(
            "enqueue",
            [self.keys.lane, self.keys.request(request_id)],
            [self.keys.prefix, request_id, payload, result_ttl_ms, int(detached)],
        )
        return state.decode()

    async def claim(self, engine_id: str, limit: int) -> list[Claim]:
        """Take up to ``limit`` waiting requests for an engine.

        Not repeated after a lost connection, since a wave may have been handed out unseen.
        """
        wave = await self._connection.run_script(
            SCRIPTS["claim"], [self.keys.lane], [self.keys.prefix, engine_id, limit], retry=False
        )
        return [
            Claim(request_id.decode(errors="replace"), payload, epoch, count, attempt)
            for request_id, payload, epoch, count, attempt in wave
        ]

    async def append(self, records: list[Record]) -> list[str]:
        """Log and publish one delta for each of many requests; returns the ids whose claim is stale."""
        args: list[Any] = [self.keys.prefix]
        for record in records:
            args += _record_args(record)
        return _refused(records, await self._run("append", [self.keys.lane], args))

    async def finish(self, records: list[FinalRecord]) -> list[str]:
        """Append the last delta of each of many requests and end them; returns the ids whose claim is stale."""
        args: list[Any] = [self.keys.prefix]
        for record in records:
            reason = record.delta.finish_reason
            if reason is None:
                raise BrokerError(f"request {record.request_id}: the last delta must carry a finish_reason")
            args += [*_record_args(record), _STATE_OF.get(reason, "finished")]
        return _refused(records, await self._run("finish", [self.keys.lane], args))

    async def cancel(self, request_id: str) -> str | None:
        """End a request; returns its state, or None if it is unknown. Cancelling twice does nothing."""
        state = await self._run(
            "cancel", [self.keys.lane, self.keys.request(request_id)], [self.keys.prefix, request_id]
        )
        return None if state is None else state.decode()

    async def release(self, claims: list[tuple[str, int]]) -> int:
        """Hand back claimed requests, given as (request_id, epoch); returns how many were still ours."""
        args: list[Any] = [self.keys.prefix]
        for request_id, epoch in claims:
            args += [request_id, epoch]
        return sum(await self._run("release", [self.keys.lane], args))

    async def read_log(self, request_id: str, start: int = 0) -> list[Delta]:
        """Return the request's records from the ``start``-th on, in order."""
        records = await self._connection.execute("LRANGE", self.keys.log(request_id), start, -1)
        return [_delta_decoder.decode(record) for record in records]

    async def state(self, request_id: str) -> str | None:
        """Return "queued", "claimed", "finished", ..., or None if the request is unknown or expired."""
        state = await self._connection.execute("HGET", self.keys.request(request_id), "state")
        return None if state is None else state.decode()

    async def forget_consumer(self, engine_id: str) -> None:
        """Drop an engine's name from the group, if nothing is pending under it: its pending entries would be lost."""
        pending = await self._connection.execute("XPENDING", self.keys.lane, GROUP, "-", "+", 1, engine_id)
        if not pending:
            await self._connection.execute("XGROUP", "DELCONSUMER", self.keys.lane, GROUP, engine_id)

    async def _run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run_script(SCRIPTS[name], keys, args)


def _record_args(record: Record) -> tuple[str, int, int, int, bytes]:
    delta = record.delta
    return record.request_id, record.epoch, delta.index, len(delta.token_ids), _encoder.encode(delta)


def _refused(records: list[Any], verdicts: list[int]) -> list[str]:
    return [record.request_id for record, verdict in zip(records, verdicts, strict=True) if verdict == REFUSED]
