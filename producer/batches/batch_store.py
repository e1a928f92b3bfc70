"""Store of a deployment's files and batches, for web apps, the gateway, jobs and commands."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ...shared.connection import RETRY_FOR_S, CommandConnection
from ...shared.errors import BatchEndedError, BatchHeldError, UnknownBatchError, UnknownFileError, ValidationError
from ...shared.keys import Keys
from ...shared.values.names import DEFAULT_NAMESPACE, check_name
from ...shared.values.shown import shown
from ..background.agenda import Agenda
from ..inputs.options import trace_headers_of
from ..webhooks.addresses import check_url
from ..webhooks.event_store import EventStore
from ..webhooks.events import WebhookEvent, WebhookTarget, derived_event_id, new_event
from ..webhooks.targets import WebhookTargets
from .batch_records import (
    COMPLETION_WINDOWS_S,
    ENDPOINTS,
    Batch,
    BatchRecord,
    BatchSpec,
    BatchStatus,
    Page,
    check_expiry,
    check_metadata,
    read_batch,
)
from .contents import Contents
from .files import SCRIPTS, Files, read_page
from .lease import LEASE_TTL_S, Lease

MAX_LIMIT, DEFAULT_LIMIT = 100, 20
_BATCH_ID_CHARS = 64


class BatchStore:
    """Files and batches. Use ``async with BatchStore(url) as store:`` (or ``open`` and ``close``).

    Args:
        url: URL of the Redis that holds the records.
        folder: folder of contents, shared by all hosts that create, run or read them. If None, PENSTOCK_FILES_DIR, or
            "files" in the user's data folder.
        lease_ttl_s: how long after a runner's death its batches can be claimed by another.
        retry_for_s: how long a call waits for a Redis that is away, ``inf`` for ever.
        namespace: prefix of all keys, the same as for the workers.

    Raises:
        ConfigurationError: the URL is malformed.
    """

    def __init__(
        self,
        url: str,
        folder: str | Path | None = None,
        *,
        lease_ttl_s: float = LEASE_TTL_S,
        retry_for_s: float = RETRY_FOR_S,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> None:
        if not 0 < lease_ttl_s < 1e6:
            raise ValidationError(f"lease_ttl_s must be positive, got {shown(lease_ttl_s)}")
        self._connection = CommandConnection(url, retry_for_s=retry_for_s)
        keys = Keys(namespace)
        self._keys = keys.batches()
        self._lease_ttl_s = lease_ttl_s
        self._targets = WebhookTargets(self._connection, keys)
        self._events = EventStore(self._connection, keys, Agenda(self._connection, keys))
        self.files = Files(self._connection, self._keys, Contents(folder))

    async def __aenter__(self) -> BatchStore:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect.

        Raises:
            RedisUnavailableError: Redis is unreachable, or refuses the login.
        """
        await self._connection.open()

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()

    async def create(
        self,
        *,
        input_file_id: str,
        endpoint: str,
        tenant: str = "default",
        completion_window: str = "24h",
        metadata: dict[str, str] | None = None,
        output_expires_after_s: int | None = None,
        webhook_url: str | None = None,
        batch_id: str | None = None,
        is_private: bool = False,
        trace_headers: dict[str, str] | None = None,
        num_rows: int = 0,
        key_name: str = "",
    ) -> Batch:
        """Create a batch from an uploaded file. A jobs process runs it, and checks its lines then.

        Args:
            webhook_url: notified of the end, by ``penstock jobs``.
            completion_window: "24h" as with OpenAI, or "7d". After it, the batch ends as "expired", with its finished
                rows.
            batch_id: idempotency key; an existing batch with this id is returned unchanged.
            is_private: the caller runs it with ``run_batch``, and no jobs process runs it before it expires.
            trace_headers: trace of all its requests, as for ``Client.submit``.
            num_rows: rows of the file, if they were counted.
            key_name: name of the API key that its requests are counted under.

        Raises:
            ValidationError: an argument is invalid.
            UnknownFileError: the tenant has no such file.
        """
        if endpoint not in ENDPOINTS:
            raise ValidationError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {shown(endpoint)}")
        window_s = _window_s(completion_window)
        await self._check_input_file(input_file_id, tenant)
        if webhook_url is not None:
            await self._targets.admit(WebhookTarget(url=check_url(webhook_url), tenant=tenant))
        now = await self.files.time_s()
        spec = BatchSpec(
            id=_checked_id(batch_id) if batch_id is not None else f"batch_{secrets.token_hex(16)}",
            tenant=check_name("tenant", tenant),
            input_file_id=input_file_id,
            endpoint=endpoint,
            created_at=int(now),
            expires_at=int(now) + window_s,
            completion_window=completion_window,
            metadata=check_metadata(metadata),
            output_expires_after_s=check_expiry("output_expires_after.seconds", output_expires_after_s),
            webhook_url=webhook_url,
            is_private=is_private,
            trace_headers=trace_headers_of({"trace_headers": trace_headers}),
            num_rows=num_rows,
            key_name=key_name,
        )
        keys = [self._keys.batch(spec.id), self._keys.batches(tenant), self._keys.open]
        args = [spec.id, msgspec.json.encode(spec), int(now * 1000)]
        await self._connection.run_script(SCRIPTS["create"], keys, args)
        return await self.get(spec.id, tenant=tenant)

    async def _check_input_file(self, file_id: str, tenant: str) -> None:
        file = await self.files.get(file_id, tenant=tenant)
        if file.purpose != "batch":
            raise ValidationError(
                f"input_file_id must be a file with purpose 'batch', got one with {shown(file.purpose)}"
            )

    async def get(self, batch_id: str, *, tenant: str = "default") -> Batch:
        """Return a batch in its current state.

        Raises:
            UnknownBatchError: the tenant has no batch with this id.
        """
        return (await self.own_record(batch_id, tenant=tenant)).batch

    async def own_record(self, batch_id: str, *, tenant: str = "default") -> BatchRecord:
        """Return the record of a batch of the tenant.

        Raises: as ``get``.
        """
        record = await self.record(batch_id)
        if record.spec.tenant != tenant:
            raise _unknown(batch_id)
        return record

    async def record(self, batch_id: str) -> BatchRecord:
        """Return the record of a batch of any tenant, for a runner.

        Raises:
            UnknownBatchError: no batch has this id.
        """
        (record,) = await self._read_batches([batch_id])
        if record is None:
            raise _unknown(batch_id)
        return record

    async def list(
        self, *, tenant: str = "default", after: str | None = None, limit: int = DEFAULT_LIMIT
    ) -> Page[Batch]:
        """Return a page of the tenant's batches, newest first.

        Raises: as ``list_records``.
        """
        page = await self.list_records(tenant=tenant, after=after, limit=limit)
        batches = [record.batch for record in page.data]
        return Page(data=batches, first_id=page.first_id, last_id=page.last_id, has_more=page.has_more)

    async def list_records(
        self,
        *,
        tenant: str = "default",
        after: str | None = None,
        limit: int = DEFAULT_LIMIT,
        order: str = "desc",
        endpoint: str | None = None,
    ) -> Page[BatchRecord]:
        """Return a page of the records of the tenant's batches, or of those with this ``endpoint``, by default the
        newest first.

        Raises:
            ValidationError: an argument is invalid, or ``after`` is not a batch of the tenant.
        """
        return await read_page(
            self._connection,
            self._keys.batches(tenant),
            self._read_batches,
            lambda record: record.batch.id,
            after=after,
            limit=limit,
            max_limit=MAX_LIMIT,
            order=order,
            matches=lambda record: endpoint is None or record.batch.endpoint == endpoint,
        )

    async def cancel(self, batch_id: str, *, tenant: str = "default") -> Batch:
        """Request the cancellation of a batch. Its runner stops within a second, and keeps finished rows. Repeating it
        has no effect.

        A "finalizing" batch has all its answers and still completes.

        Raises:
            UnknownBatchError: the tenant has no batch with this id.
            BatchEndedError: it has ended.
        """
        await self.get(batch_id, tenant=tenant)
        status = await self._connection.run_script(SCRIPTS["cancel"], [self._keys.batch(batch_id)], [])
        if BatchStatus(status.decode()).is_end:
            raise BatchEndedError(f"batch {shown(batch_id)} has ended ({status.decode()}) and cannot be cancelled")
        return await self.get(batch_id, tenant=tenant)

    async def delete(self, record: BatchRecord) -> None:
        """Delete an ended batch and its files."""
        batch, tenant = record.batch, record.spec.tenant
        for file_id in filter(None, (batch.input_file_id, batch.output_file_id, batch.error_file_id)):
            with contextlib.suppress(UnknownFileError):  # it has expired, or was deleted
                await self.files.delete(file_id, tenant=tenant)
        await self._connection.execute("ZREM", self._keys.batches(tenant), batch.id)
        await self._connection.execute("DEL", self._keys.batch(batch.id))

    async def claim(self, batch_id: str) -> Lease:
        """Claim the lease of an open batch, to be entered with ``async with``.

        Raises:
            UnknownBatchError: no batch has this id.
            BatchEndedError: it has ended, and its end was reported.
            BatchHeldError: another runner holds it.
        """
        record = await self.record(batch_id)
        holder, ttl_ms = secrets.token_hex(12), int(self._lease_ttl_s * 1000)
        keys = [self._keys.batch(batch_id), self._keys.open]
        answer = await self._connection.run_script(SCRIPTS["claim"], keys, [batch_id, holder, ttl_ms])
        if answer[0] == b"closed":
            raise BatchEndedError(f"batch {shown(batch_id)} has ended")
        if answer[0] == b"held":
            raise BatchHeldError(
                f"batch {shown(batch_id)} is held by another runner; its lease lasts {answer[1] / 1000:.1f} s"
            )
        return Lease(self._connection, self._keys, record.spec, holder, epoch=answer[1], ttl_ms=ttl_ms)

    async def report_end(self, record: BatchRecord) -> None:
        """Create the webhook event of a batch's end. Repeating it creates no second event."""
        event = event_of_end(record)
        if event is not None:
            await self._events.create(event)

    async def open_batches(self, limit: int = MAX_LIMIT) -> Sequence[BatchRecord]:
        """Return the open batches of all tenants, sorted by the expiry of their leases."""
        ids = await self._connection.execute("ZRANGE", self._keys.open, 0, limit - 1)
        return [
            record for record in await self._read_batches([batch_id.decode() for batch_id in ids]) if record is not None
        ]

    async def free_batches(self) -> Sequence[str]:
        """Return the open batches that no live runner seems to hold."""
        now_s = await self.files.time_s()
        now_ms, ttl_ms = int(now_s * 1000), int(self._lease_ttl_s * 1000)
        ids = await self._connection.execute("ZRANGEBYSCORE", self._keys.open, "-inf", now_ms)
        # Also leases set by a clock that was ahead: an attempt to claim one shortens it.
        ids += await self._connection.execute("ZRANGEBYSCORE", self._keys.open, f"({now_ms + ttl_ms}", "+inf")
        specs = [
            None if record is None else record.spec
            for record in await self._read_batches([batch_id.decode() for batch_id in ids])
        ]
        return [spec.id for spec in specs if spec is not None and (not spec.is_private or now_s >= spec.expires_at)]

    async def _read_batches(self, ids: Sequence[str]) -> Sequence[BatchRecord | None]:
        keys = map(self._keys.batch, ids)
        replies = await asyncio.gather(*(self._connection.execute("HGETALL", key) for key in keys))
        return [_to_record(reply) for reply in replies]


def _to_record(reply: Any) -> BatchRecord | None:
    """Return the record of a reply to HGETALL, which is a map or a flat list, depending on the protocol."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    fields = {name.decode(): value for name, value in pairs}
    return read_batch(fields) if "spec" in fields else None


def _window_s(completion_window: str) -> int:
    window_s = COMPLETION_WINDOWS_S.get(completion_window)
    if window_s is None:
        raise ValidationError(
            f"completion_window must be one of {', '.join(COMPLETION_WINDOWS_S)}, got {shown(completion_window)}"
        )
    return window_s


def _checked_id(batch_id: str) -> str:
    plain = batch_id.removeprefix("batch_")
    if plain == batch_id or not plain.isalnum() or not plain.isascii() or len(batch_id) > _BATCH_ID_CHARS:
        raise ValidationError(f"batch_id must be 'batch_' and letters or digits, got {shown(batch_id)}")
    return batch_id


def _unknown(batch_id: str) -> UnknownBatchError:
    return UnknownBatchError(f"unknown batch {shown(batch_id)}")


def event_of_end(record: BatchRecord) -> WebhookEvent | None:
    """Return the event of an ended batch; None if it has no webhook. Its id is derived from the batch and its status.

    Types and body: https://platform.openai.com/docs/guides/webhooks.
    """
    spec, batch = record.spec, record.batch
    if spec.webhook_url is None:
        return None
    event_id = derived_event_id(f"{batch.id} {batch.status}")
    ended_at = getattr(batch, f"{batch.status}_at")
    return new_event(event_id, f"batch.{batch.status}", spec.webhook_url, spec.tenant, ended_at, {"id": batch.id})
