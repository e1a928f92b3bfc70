"""The lease of a batch: one runner at a time by the clock of Redis, and only its writes are accepted.

A runner that was stopped for longer than the lease may find that another has claimed the batch. The script refuses all
its later writes, because its holder token is no longer the one in the batch. The holder is a random token and not the
epoch, because a Redis that loses its last second in a crash could issue an epoch twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ...shared.connection import CommandConnection
from ...shared.errors import BatchTakenOverError, BrokerError, PenstockError
from ...shared.keys import BatchKeys
from ...shared.values.shown import shown
from .batch_records import BatchSpec, BatchStatus, FileRecord
from .files import SCRIPTS, file_args

LEASE_TTL_S = 5.0
# Each renewal also reads cancellations and writes the counts.
RENEW_INTERVAL_S = 1.0
# Limit of the wait for Redis at the end; after that the lease expires.
RELEASE_TIMEOUT_S = 2.0
# How long the finished rows outlive the batch's end, since a Redis that lost its last second may not know of the end.
WORK_TTL_MS = 3600 * 1000
BATCH_TTL_MS = 90 * 24 * 3600 * 1000

Fields = dict[str, str | int | bytes]


class Interruption(enum.Enum):
    """Why a run ends before its last row."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Lease:
    """The lease of one batch. Inside ``async with`` it is renewed; at the end it is released.

    Attributes:
        epoch: how often the batch was claimed, including this time.
        interruption: done when the run must end early. Its exception is why the lease could not be renewed.
        counts: returns the fields to write with each renewal.
    """

    def __init__(
        self, connection: CommandConnection, keys: BatchKeys, spec: BatchSpec, holder: str, *, epoch: int, ttl_ms: int
    ) -> None:
        self.spec = spec
        self.holder = holder
        self.epoch = epoch
        self.interruption: asyncio.Future[Interruption] = asyncio.get_running_loop().create_future()
        self.counts: Callable[[], Fields] = dict
        self._connection = connection
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        self._renewal = asyncio.create_task(self._renew_batch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._renewal is not None
        self._renewal.cancel()
        await asyncio.wait([self._renewal])
        if self.interruption.done() and not self.interruption.cancelled():
            self.interruption.exception()  # mark the exception as retrieved
        # A lease that cannot be released expires. The block itself raises the reason.
        with contextlib.suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._write_fields(ttl_ms=0)

    async def write(
        self, status: BatchStatus | None = None, fields: Fields | None = None, files: Sequence[FileRecord] = ()
    ) -> BatchStatus:
        """Write fields, change to ``status`` and create ``files``, all or nothing. Returns the status.

        The status returned differs from ``status`` if the batch was cancelled; then nothing was written.

        Raises:
            BatchTakenOverError: another runner has claimed the batch.
        """
        status_now, _ = await self._write_fields(status, fields, files, ttl_ms=self._ttl_ms)
        return status_now

    async def close(self) -> bool:
        """Close the batch, after its end was reported. Returns whether this runner still held it."""
        keys = [self._keys.batch(self.spec.id), self._keys.open]
        args = [self.spec.id, self.holder, BATCH_TTL_MS]
        return bool(await self._connection.run_script(SCRIPTS["close"], keys, args))

    async def _renew_batch(self) -> None:
        """Renew the lease until the end of the block, even while the run is ending."""
        interval_s = min(RENEW_INTERVAL_S, self._ttl_ms / 3000)
        while True:
            await asyncio.sleep(interval_s)
            try:
                status, now_s = await self._write_fields(fields=self.counts(), ttl_ms=self._ttl_ms)
            except Exception as error:
                if not self.interruption.done():
                    self.interruption.set_exception(error)
                return
            if self.interruption.done():
                continue
            if status is BatchStatus.CANCELLING:
                self.interruption.set_result(Interruption.CANCELLED)
            elif now_s >= self.spec.expires_at:
                self.interruption.set_result(Interruption.EXPIRED)

    async def _write_fields(
        self,
        status: BatchStatus | None = None,
        fields: Fields | None = None,
        files: Sequence[FileRecord] = (),
        *,
        ttl_ms: int,
    ) -> tuple[BatchStatus, float]:
        """Write, and return the status and the time of Redis in seconds."""
        batch_id, values = self.spec.id, fields or {}
        keys = [self._keys.batch(batch_id), self._keys.open, self._keys.garbage, self._keys.files(self.spec.tenant)]
        keys += [self._keys.file(record.file.id) for record in files]
        args: list[Any] = [
            batch_id,
            self.holder,
            ttl_ms,
            "" if status is None else status.value,
            WORK_TTL_MS,
            len(values),
        ]
        for name, value in values.items():
            args += (name, value)
        for record in files:
            args += file_args(record, record.file.created_at)
        answer = await self._connection.run_script(SCRIPTS["write"], keys, args)
        if answer[0] == b"stale":
            raise BatchTakenOverError(f"batch {shown(batch_id)} was taken over by another runner, which continues it")
        current = BatchStatus(answer[1].decode())
        if answer[0] == b"refused" and current is not BatchStatus.CANCELLING:
            raise BrokerError(f"batch {shown(batch_id)} is {current}, and cannot become {status}")
        return current, answer[2] / 1000
