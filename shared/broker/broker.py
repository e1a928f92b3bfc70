"""One model's part of the broker, as methods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from ..connection import CommandConnection
from ..deployment.records import DeathCause
from ..errors import DamagedRecordError, PenstockError
from ..keys import ModelKeys
from ..messages.deltas import Delta
from ..queue.request_state import RequestState
from ..redis_access.command_parts import in_parts
from .admission import Entry, enqueue_args, read_answer
from .damage import refusing_damage
from .input import RequestInput
from .repair import repairing, run_script
from .writes import FinalRecord, Record, SegmentRecord, append_args, final_args, refused_ids, segment_args

_encoder = msgspec.msgpack.Encoder()
_delta_decoder = msgspec.msgpack.Decoder(Delta)

LEASE_TTL_MS = 3000
UNLIMITED_KV_TOKENS = 2**40
# capacity.lua wakes engines. An engine without a wake claims after this time anyway.
IDLE_POLL_S = 5.0
# Of 64 sequences 4 are kept for tenants that have less than an equal part, where tenants share the model.
SEQS_PER_KEPT_ONE = 16
REAP_INTERVAL_S = 0.75
# Engines end what they run at its deadline by themselves; whoever else does leaves them so long.
EXPIRY_GRACE_MS = 1000
# A gap between two looks that is much longer than their interval means that this server or all of them stood still.
MAX_REAP_GAP_MS = 2000


class Claim(msgspec.Struct, frozen=True):
    """A request handed to an engine. ``payload`` is undecoded: it may be anything.

    ``num_kv_tokens`` is what it is reckoned to take of the KV cache, ``expires_in_ms`` -1 without a deadline,
    ``waited_ms`` the time since it entered its lane.
    """

    request_id: str
    payload: bytes
    epoch: int
    num_logged_tokens: int
    attempt: int
    # Output tokens before which the engine takes no other request; -1 if it may. This one is suspected of a death.
    alone_until: int = -1
    num_kv_tokens: int = 0
    expires_in_ms: int = -1
    waited_ms: int = 0
    # Number of the partition that it was claimed from.
    partition: int = 0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can hold: sequences, and tokens in its KV cache; and what of it is taken.

    ``num_kept_seqs`` of its sequences are for tenants that have less than an equal part, while several use the model.
    """

    max_num_seqs: int
    num_seqs: int = 0
    num_kv_tokens: int = UNLIMITED_KV_TOKENS
    num_held_kv_tokens: int = 0
    num_kept_seqs: int = 0


class Wave(msgspec.Struct, frozen=True):
    """What one claim got. After ``retry_ms`` there may be more without a wake; -1 if nothing is known of.

    It took all there was or all that there was room for. What comes after it wakes an engine with room.
    ``is_saving``: the engine is to take nothing elsewhere either, since it saves its room for one that waits here.
    """

    claims: list[Claim]
    retry_ms: int = -1
    is_saving: bool = False

    @property
    def wait_s(self) -> float:
        """How long the engine waits for a wake, or an end of its own, before it looks by itself."""
        return IDLE_POLL_S if self.retry_ms < 0 else min(IDLE_POLL_S, self.retry_ms / 1000)


class Reaped(msgspec.Struct, frozen=True):
    """What a reaper found: ``kind`` is "engine" or "client"; counts are of requests queued again or cancelled, and
    parked."""

    kind: str
    name: str
    num_requests: int
    num_parked: int


class Broker:
    """Every change of state of one model's requests, as one round trip each. ``input`` is that of resumable ones.

    A model may have several partitions (``shared/partitions/``): it is of one of them then, with its keys and number.

    All methods raise ``RedisUnavailableError`` when Redis stays away for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys, partition: int = 0) -> None:
        self._connection = connection
        self.keys = keys
        self.partition = partition
        self.input = RequestInput(connection, keys)

    async def enqueue(self, request_id: str, payload: bytes, **options: Any) -> str:
        """Put one encoded request in line; ``options`` are the other fields of ``Entry``.

        Returns: as ``enqueue_many``. Raises what it returns as an error.
        """
        (answer,) = await self.enqueue_many([Entry(request_id=request_id, payload=payload, **options)])
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def enqueue_many(self, entries: Sequence[Entry]) -> list[str | PenstockError]:
        """Put encoded requests in line, in order, unless their ids are known: then nothing changes.

        Returns for each ``NEW``, ``UNSERVED``, the state of the request that already has the id, ``RELAID`` or ``LEFT``
        (to who goes by partitions, see ``shared/partitions/``), or the error by which it was refused:
        ``QueueFullError``, ``QuotaExceededError``, ``ValidationError`` of an unknown band, ``RequestConflictError``.

        Raises:
            RedisFullError: Redis has no memory left; nothing was enqueued.
        """
        answers = await self._run("enqueue", [self.keys.leases], enqueue_args(entries), waits_if_full=False)
        return [read_answer(entry, answer) for entry, answer in zip(entries, answers, strict=True)]

    async def claim(self, engine_id: str, room: Room, *, lease_ttl_ms: int = LEASE_TTL_MS) -> Wave:
        """Take waiting requests for an engine, as many as it has room for.

        Not repeated after a lost connection, since a wave may have been handed out unseen: compare ``claims`` then.
        """
        wave, retry_ms, is_saving = await run_script(
            self._connection,
            self.keys,
            "claim",
            [self.keys.leases],
            [
                engine_id,
                lease_ttl_ms,
                max(0, room.max_num_seqs - room.num_seqs),
                room.num_seqs,
                room.num_kv_tokens,
                room.num_held_kv_tokens,
                room.num_kept_seqs,
            ],
            retry=False,
        )
        claims = [
            Claim(request_id.decode(errors="replace"), *rest, partition=self.partition) for request_id, *rest in wave
        ]
        return Wave(claims, retry_ms, bool(is_saving))

    async def claims(self, engine_id: str) -> list[tuple[str, int]]:
        """Return what an engine holds by Redis's word, as (request_id, epoch)."""
        key = self.keys.claims(engine_id)
        flat = await repairing(self._connection, self.keys, lambda: self._connection.execute("HGETALL", key))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        # What is no epoch was not written by the claim of this request, which is found when it is handed back.
        return [(request_id.decode(), int(epoch) if epoch.isdigit() else 0) for request_id, epoch in pairs]

    async def renew(
        self, engine_id: str, claims: list[tuple[str, int]], *, lease_ttl_ms: int = LEASE_TTL_MS
    ) -> list[str]:
        """Renew an engine's lease and its claims, given as (request_id, epoch); returns the stale ones' ids."""
        stale: list[bytes] = []
        for part in in_parts(claims, 2) if claims else [[]]:
            stale += await self._run("renew", [self.keys.leases], [engine_id, lease_ttl_ms, *chain(*part)])
        return [request_id.decode() for request_id in stale]

    async def withdraw(self, engine_id: str) -> None:
        """Let the other engines count on no room of this one, which claims nothing until it says otherwise."""
        await self._run("withdraw", [self.keys.leases], [engine_id])

    async def renew_client(self, client_id: str, ttl_ms: int) -> None:
        """Renew a client's lease, which its interactive requests live by."""
        await self._run("renew_client", [self.keys.leases], [client_id, ttl_ms])

    async def reclaim(
        self, engine_id: str, cause: DeathCause, *, is_external: bool, max_deliveries: int
    ) -> tuple[int, int]:
        """Take back what an engine holds that is known to be dead; returns how many were queued again and parked.

        Args:
            is_external: it was killed from outside, so what it held is hardly to blame.
            max_deliveries: a request that this many engines died on is parked.
        """
        counts = await self._run(
            "reclaim",
            [self.keys.leases],
            [engine_id, int(is_external), max_deliveries, _encoder.encode(cause)],
        )
        return counts[0], counts[1]

    async def reap(self, cause: DeathCause, *, max_deliveries: int, lease_ttl_ms: int = LEASE_TTL_MS) -> list[Reaped]:
        """Take back what engines hold whose lease has ended, and cancel what vanished clients waited for.

        However many there are, Redis serves others in between: one script takes 64 engines and 256 clients.
        """
        args = [max_deliveries, lease_ttl_ms, MAX_REAP_GAP_MS, _encoder.encode(cause)]
        reaped: list[Reaped] = []
        is_more = True
        while is_more:
            found, is_more = await self._run("reap", [self.keys.leases], args)
            reaped += [Reaped(kind.decode(), name.decode(), count, parked) for kind, name, count, parked in found]
        return reaped

    async def expire(self, *, grace_ms: int = EXPIRY_GRACE_MS) -> int:
        """End what is past its deadline, what runs only after ``grace_ms``; returns how many.

        Anyone may do it: supervisors do all the time, and a client whose request is due.
        """
        return await self._run("expire", [self.keys.leases], [1000, grace_ms])

    async def append(self, records: list[Record]) -> list[str]:
        """Log and publish one delta for each of many requests; returns the ids whose claim is stale."""
        return await self._write("append", records, [append_args(record) for record in records])

    async def finish(self, records: list[FinalRecord]) -> list[str]:
        """Append the last delta of each of many requests and end them; returns the ids whose claim is stale."""
        return await self._write("finish", records, [final_args(record) for record in records])

    async def end_segments(self, records: list[SegmentRecord]) -> list[str]:
        """Append the last delta of a segment of each of many resumable requests, and let go of their claims.

        Each goes on with its next chunk, if it has one; ends, if its input is closed; and awaits input otherwise.
        Returns the ids whose claim is stale.
        """
        return await self._write("end_segment", records, [segment_args(record) for record in records])

    async def cancel(self, request_id: str) -> RequestState | None:
        """End a request; returns its state, or None if it is unknown. Cancelling twice does nothing."""
        state = await self._run("cancel", [self.keys.request(request_id)], [request_id])
        return None if state is None else RequestState(state.decode())

    async def leave(self, request_id: str, ttl_ms: int) -> None:
        """Let an interactive request live on without its client for ``ttl_ms``, then as long as somebody listens."""
        await self._run("leave", [self.keys.request(request_id)], [request_id, ttl_ms])

    async def count_known(self, request_ids: Sequence[str]) -> int:
        """Return how many of these ids are those of a request that has not expired."""
        parts = in_parts([self.keys.request(request_id) for request_id in request_ids])
        return sum([await self._connection.execute("EXISTS", *part) for part in parts])

    async def known(self, request_id: str) -> bool:
        """Whether there is a request of this id that has not expired."""
        return bool(await self._connection.execute("EXISTS", self.keys.request(request_id)))

    async def count_waiting(self) -> int:
        """Return how many requests wait that an engine may claim; 0 while the queue is paused."""
        return await self._run("count_waiting", [self.keys.leases], [])

    async def lay_out(self, version: int) -> None:
        """Refuse from now on who goes by an older layout of the model's partitions."""
        await self._run("lay_out", [self.keys.leases], [version])

    async def engines(self) -> list[str]:
        """Return the ids of the engines that hold a lease here, or did a moment ago, in order."""
        return sorted(name.decode() for name in await self._connection.execute("ZRANGE", self.keys.leases, 0, -1))

    async def forget(self, request_id: str) -> None:
        """Take away what is kept of a request that has ended, before its time; ``cancel`` one that may not have."""
        keys = self.keys
        await self._connection.execute("UNLINK", *(key(request_id) for key in (keys.request, keys.log, keys.input)))

    async def shorten(self, request_ids: Sequence[str], ttl_ms: int) -> int:
        """Keep results that were read to their end for ``ttl_ms`` at most; returns how many would have lived longer."""
        parts = in_parts(request_ids)
        return sum([await self._run("shorten", [self.keys.leases], [ttl_ms, *part]) for part in parts])

    async def release(self, claims: list[tuple[str, int]]) -> int:
        """Hand back claimed requests, given as (request_id, epoch); returns how many were still ours."""
        parts = in_parts(claims, 2)
        return sum([sum(await self._run("release", [self.keys.leases], [*chain(*part)])) for part in parts])

    async def read_log(self, request_id: str, start: int = 0) -> list[Delta]:
        """Return the request's records from the ``start``-th on, in order.

        Raises:
            DamagedRecordError: others than the scripts have written to the log.
        """
        with refusing_damage(request_id, "log"):
            records = await self._connection.execute("LRANGE", self.keys.log(request_id), start, -1)
            return [_delta_decoder.decode(record) for record in records]

    async def images(self, digests: Sequence[str]) -> list[bytes]:
        """Return the bytes of images that a request needs, in order.

        Raises:
            DamagedRecordError: others than the scripts have taken one away.
        """
        found: dict[str, bytes] = {}
        for digest in dict.fromkeys(digests):
            data = await self._connection.execute("GET", self.keys.image(digest))
            if data is None:
                raise DamagedRecordError(f"the bytes of image {digest} are gone from Redis; send the request again")
            found[digest] = data
        return [found[digest] for digest in digests]

    async def state(self, request_id: str) -> RequestState | None:
        """Return the state of a request, or None: it is unknown, or its result has expired.

        Raises:
            DamagedRecordError: others than the scripts have written to its record.
        """
        with refusing_damage(request_id, "record"):
            state = await self._connection.execute("HGET", self.keys.request(request_id), "state")
            return None if state is None else msgspec.convert(state.decode(), RequestState)

    async def park(self, claim: Claim, cause: DeathCause, code: str, message: str) -> bool:
        """Set a claimed request aside that no engine can run, with an error for its caller. False if it is stale."""
        args = [claim.request_id, claim.epoch, _encoder.encode(cause), code, message]
        return bool(await self._run("park", [self.keys.leases], args))

    async def _write(self, name: str, records: Sequence[Record], rows: Sequence[Sequence[Any]]) -> list[str]:
        """Run a script for records, whose arguments are the rows; returns the ids whose claim is stale."""
        verdicts: list[int] = []
        for part in in_parts(rows, len(rows[0]) if rows else 1):
            verdicts += await self._run(name, [self.keys.leases], [*chain(*part)])
        return refused_ids(records, verdicts)

    async def _run(self, name: str, keys: list[str], args: list[Any], **how: bool) -> Any:
        return await run_script(self._connection, self.keys, name, keys, args, **how)
