"""The broker of one model: a method for each change of state."""

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
from ..queue.lifecycle import RequestState
from ..redis_access.link import in_parts
from .admission import Entry, enqueue_args, read_answer
from .input import RequestInput
from .script import refusing_damage, repairing, run_script
from .writes import FinalRecord, Record, SegmentRecord, append_args, final_args, refused_ids, segment_args

_encoder = msgspec.msgpack.Encoder()
_delta_decoder = msgspec.msgpack.Decoder(Delta)

LEASE_TTL_MS = 3000
UNLIMITED_KV_TOKENS = 2**40
# capacity.lua wakes engines. An engine without a wake claims after this time anyway.
IDLE_POLL_S = 5.0
# Of 64 sequences 4 are reserved for tenants that run less than an equal part, while tenants share the model.
SEQS_PER_KEPT_ONE = 16
REAP_INTERVAL_S = 0.75
# Engines end their running requests at the deadline. Other processes wait this much longer before they do.
EXPIRY_GRACE_MS = 1000
# A gap between two reaps that is longer than this means that the server or all reapers were stopped.
MAX_REAP_GAP_MS = 2000


class Claim(msgspec.Struct, frozen=True):
    """A claimed request. ``payload`` is undecoded, because it may be anything.

    ``num_kv_tokens`` is its estimated use of the KV cache, ``expires_in_ms`` is -1 without a deadline, and
    ``waited_ms`` is the time since it entered its lane.
    """

    request_id: str
    payload: bytes
    epoch: int
    num_logged_tokens: int
    attempt: int
    # The output length until which the engine must claim no other request, because this one may have killed its
    # previous engine; -1 without such a limit.
    alone_until: int = -1
    num_kv_tokens: int = 0
    expires_in_ms: int = -1
    waited_ms: int = 0
    # Number of the partition it was claimed from.
    partition: int = 0


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and load of an engine: sequences, and tokens in its KV cache.

    ``num_kept_seqs`` of its sequences are reserved for tenants that run less than an equal part, while several tenants
    use the model.
    """

    max_num_seqs: int
    num_seqs: int = 0
    num_kv_tokens: int = UNLIMITED_KV_TOKENS
    num_held_kv_tokens: int = 0
    num_kept_seqs: int = 0


class Wave(msgspec.Struct, frozen=True):
    """Requests of one claim. ``retry_ms`` is when to claim again without a wake; -1 if unknown.

    A wave has all requests that could be claimed, or all that fit. A new request wakes an engine with free capacity.
    ``is_saving``: the engine must not claim from other queues either, since it reserves its capacity for a request of
    this one.
    """

    claims: list[Claim]
    retry_ms: int = -1
    is_saving: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds for which the engine waits for a wake, or for an end of its own, before it claims again."""
        return IDLE_POLL_S if self.retry_ms < 0 else min(IDLE_POLL_S, self.retry_ms / 1000)


class ReapResult(msgspec.Struct, frozen=True):
    """Result of a reap for one engine or client, which ``kind`` says. Counts are of requests queued again or

    cancelled, and parked.
    """

    kind: str
    name: str
    num_requests: int
    num_parked: int


class Broker:
    """Every change of state of one model's requests, as one round trip each. ``input`` is that of resumable requests.

    A model may have several partitions (``shared/partitions/``). Then this is one of them, with its keys and number.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys, partition: int = 0) -> None:
        self._connection = connection
        self.keys = keys
        self.partition = partition
        self.input = RequestInput(connection, keys)

    async def enqueue(self, request_id: str, payload: bytes, **options: Any) -> str:
        """Enqueue one encoded request; ``options`` are the other fields of ``Entry``.

        Returns: as ``enqueue_many``, whose errors are raised.
        """
        (answer,) = await self.enqueue_many([Entry(request_id=request_id, payload=payload, **options)])
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def enqueue_many(self, entries: Sequence[Entry]) -> list[str | PenstockError]:
        """Enqueue encoded requests, in order. Known ids change nothing.

        Returns for each ``NEW``, ``UNSERVED``, the state of the request that already has the id, ``RELAID`` or ``LEFT``
        (to callers that use partitions, see ``shared/partitions/``), or the error of its refusal: ``QueueFullError``,
        ``QuotaExceededError``, ``InsufficientQuotaError``, ``ValidationError`` of an unknown band,
        ``RequestConflictError``.

        Raises:
            RedisFullError: Redis has no memory left; nothing was enqueued.
        """
        answers = await self._run_script("enqueue", [self.keys.leases], enqueue_args(entries), waits_if_full=False)
        return [read_answer(entry, answer) for entry, answer in zip(entries, answers, strict=True)]

    async def claim(self, engine_id: str, room: EngineCapacity, *, lease_ttl_ms: int = LEASE_TTL_MS) -> Wave:
        """Claim waiting requests for an engine, as many as fit.

        Not repeated after a lost connection, since the reply of a claim may have been lost: compare ``claims`` then.
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
        """Return the claims of an engine that Redis has, as (request_id, epoch)."""
        key = self.keys.claims(engine_id)
        flat = await repairing(self._connection, self.keys, lambda: self._connection.execute("HGETALL", key))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        # A value that is not an epoch was not written by a claim. The damage is detected when the request is released.
        return [(request_id.decode(), int(epoch) if epoch.isdigit() else 0) for request_id, epoch in pairs]

    async def renew(
        self, engine_id: str, claims: list[tuple[str, int]], *, lease_ttl_ms: int = LEASE_TTL_MS
    ) -> list[str]:
        """Renew an engine's lease and its claims, passed as (request_id, epoch). Return the ids of stale ones."""
        stale: list[bytes] = []
        for part in in_parts(claims, 2) if claims else [[]]:
            stale += await self._run_script("renew", [self.keys.leases], [engine_id, lease_ttl_ms, *chain(*part)])
        return [request_id.decode() for request_id in stale]

    async def withdraw(self, engine_id: str) -> None:
        """Withdraw this engine's capacity: it claims nothing until it claims again."""
        await self._run_script("withdraw", [self.keys.leases], [engine_id])

    async def renew_client(self, client_id: str, ttl_ms: int) -> None:
        """Renew a client's lease, on which its interactive requests depend."""
        await self._run_script("renew_client", [self.keys.leases], [client_id, ttl_ms])

    async def reclaim(
        self, engine_id: str, cause: DeathCause, *, is_external: bool, max_deliveries: int
    ) -> tuple[int, int]:
        """Reclaim the requests of a dead engine. Return how many were queued again and parked.

        Args:
            is_external: it was killed from outside, so its requests are hardly to blame.
            max_deliveries: number of engines that died on a request before it is parked.
        """
        counts = await self._run_script(
            "reclaim",
            [self.keys.leases],
            [engine_id, int(is_external), max_deliveries, _encoder.encode(cause)],
        )
        return counts[0], counts[1]

    async def reap(
        self, cause: DeathCause, *, max_deliveries: int, lease_ttl_ms: int = LEASE_TTL_MS
    ) -> list[ReapResult]:
        """Reclaim the requests of engines whose lease has expired, and cancel those of vanished clients.

        Redis serves other clients in between, however many there are: one script handles 64 engines and 256 clients.
        """
        args = [max_deliveries, lease_ttl_ms, MAX_REAP_GAP_MS, _encoder.encode(cause)]
        reaped: list[ReapResult] = []
        is_more = True
        while is_more:
            rows, is_more = await self._run_script("reap", [self.keys.leases], args)
            reaped += [ReapResult(kind.decode(), name.decode(), count, parked) for kind, name, count, parked in rows]
        return reaped

    async def expire(self, *, grace_ms: int = EXPIRY_GRACE_MS) -> int:
        """End requests past their deadline, running ones only after ``grace_ms``. Return how many.

        Supervisors call it continuously, and a client when its request is due.
        """
        return await self._run_script("expire", [self.keys.leases], [1000, grace_ms])

    async def append(self, records: list[Record]) -> list[str]:
        """Log and publish one delta for each of many requests. Return the ids whose claim is stale."""
        return await self._write_records("append", records, [append_args(record) for record in records])

    async def finish(self, records: list[FinalRecord]) -> list[str]:
        """Append the last delta of each of many requests and end them. Return the ids whose claim is stale."""
        return await self._write_records("finish", records, [final_args(record) for record in records])

    async def end_segments(self, records: list[SegmentRecord]) -> list[str]:
        """Append the last delta of a segment of each of many resumable requests, and release their claims.

        Each continues with its next chunk, if it has one; ends, if its input is closed; and awaits input otherwise.
        Returns the ids whose claim is stale.
        """
        return await self._write_records("end_segment", records, [segment_args(record) for record in records])

    async def cancel(self, request_id: str) -> RequestState | None:
        """End a request. Return its state, or None if it is unknown. A second call has no effect."""
        state = await self._run_script("cancel", [self.keys.request(request_id)], [request_id])
        return None if state is None else RequestState(state.decode())

    async def retry(self, request_id: str) -> bool:
        """Queue a request again that failed, was cancelled or expired: detached, under its id, from its prompt.

        False if it is in another state, or its input is not retained: that of interactive requests, of requests with
        images or with a prompt in parts, and of purged ones never is.
        """
        return bool(await self._run_script("replay", [self.keys.leases], [request_id, 1]))

    async def leave(self, request_id: str, ttl_ms: int) -> None:
        """Let an interactive request outlive its client by ``ttl_ms``, then for as long as a reader listens."""
        await self._run_script("leave", [self.keys.request(request_id)], [request_id, ttl_ms])

    async def count_known(self, request_ids: Sequence[str]) -> int:
        """Return how many of these ids belong to a request that has not expired."""
        parts = in_parts([self.keys.request(request_id) for request_id in request_ids])
        return sum([await self._connection.execute("EXISTS", *part) for part in parts])

    async def known(self, request_id: str) -> bool:
        """Whether a request of this id exists and has not expired."""
        return bool(await self._connection.execute("EXISTS", self.keys.request(request_id)))

    async def count_waiting(self) -> int:
        """Return how many waiting requests an engine may claim; 0 while the queue is paused."""
        return await self._run_script("count_waiting", [self.keys.leases], [])

    async def lay_out(self, version: int) -> None:
        """Refuse calls that use an older layout of the model's partitions from now on."""
        await self._run_script("lay_out", [self.keys.leases], [version])

    async def engines(self) -> list[str]:
        """Return the ids of the engines with a lease here, including ones that expired recently, in order."""
        return sorted(name.decode() for name in await self._connection.execute("ZRANGE", self.keys.leases, 0, -1))

    async def forget(self, request_id: str) -> None:
        """Delete the data of an ended request before it expires. ``cancel`` a request that may be live."""
        keys = self.keys
        await self._connection.execute("UNLINK", *(key(request_id) for key in (keys.request, keys.log, keys.input)))

    async def shorten(self, request_ids: Sequence[str], ttl_ms: int) -> int:
        """Retain results that were read to the end for ``ttl_ms`` at most. Return how many were shortened."""
        parts = in_parts(request_ids)
        return sum([await self._run_script("shorten", [self.keys.leases], [ttl_ms, *part]) for part in parts])

    async def release(self, claims: list[tuple[str, int]], *, cause: str = "") -> int:
        """Release claims, passed as (request_id, epoch). Return how many were still valid.

        Args:
            cause: for the events of the requests.
        """
        keys, parts = [self.keys.leases], in_parts(claims, 2)
        return sum([sum(await self._run_script("release", keys, [cause, *chain(*part)])) for part in parts])

    async def read_log(self, request_id: str, start: int = 0) -> list[Delta]:
        """Return the request's records from the ``start``-th on, in order.

        Raises:
            DamagedRecordError: something other than the scripts has written to the log.
        """
        with refusing_damage(request_id, "log"):
            records = await self._connection.execute("LRANGE", self.keys.log(request_id), start, -1)
            return [_delta_decoder.decode(record) for record in records]

    async def images(self, digests: Sequence[str]) -> list[bytes]:
        """Return the bytes of images that a request needs, in order.

        Raises:
            DamagedRecordError: something other than the scripts has deleted one.
        """
        data_of: dict[str, bytes] = {}
        for digest in dict.fromkeys(digests):
            data = await self._connection.execute("GET", self.keys.image(digest))
            if data is None:
                raise DamagedRecordError(f"the bytes of image {digest} are no longer in Redis; send the request again")
            data_of[digest] = data
        return [data_of[digest] for digest in digests]

    async def state(self, request_id: str) -> RequestState | None:
        """Return the state of a request; None if it is unknown, or its result has expired.

        Raises:
            DamagedRecordError: something other than the scripts has written to its record.
        """
        with refusing_damage(request_id, "record"):
            state = await self._connection.execute("HGET", self.keys.request(request_id), "state")
            return None if state is None else msgspec.convert(state.decode(), RequestState)

    async def park(self, claim: Claim, cause: DeathCause, code: str, message: str) -> bool:
        """Park a claimed request that no engine can run, with an error for its caller. False if it is stale."""
        args = [claim.request_id, claim.epoch, _encoder.encode(cause), code, message]
        return bool(await self._run_script("park", [self.keys.leases], args))

    async def _write_records(self, name: str, records: Sequence[Record], rows: Sequence[Sequence[Any]]) -> list[str]:
        """Run a script for records, whose arguments are the rows. Return the ids whose claim is stale."""
        verdicts: list[int] = []
        for part in in_parts(rows, len(rows[0]) if rows else 1):
            verdicts += await self._run_script(name, [self.keys.leases], [*chain(*part)])
        return refused_ids(records, verdicts)

    async def _run_script(self, name: str, keys: list[str], args: list[Any], **how: bool) -> Any:
        return await run_script(self._connection, self.keys, name, keys, args, **how)
