"""The right to run a batch: one runner at a time by the clock of Redis, and only its writes are accepted.

A runner that stopped for longer than the lease lasts may find that another has taken the batch. All that it writes from
then on is refused by the script, because the holder that it names is no more the one in the batch. The holder is a
random token and not the epoch: a Redis that loses its last second with its machine would give an epoch out twice.
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
from ...shared.shown import shown
from .batch_records import BatchSpec, BatchStatus, FileRecord
from .files import file_args
from .script_texts import SCRIPTS

LEASE_TTL_S = 5.0
# A cancellation is seen, and the counts are told, as often as the lease is renewed.
RENEW_INTERVAL_S = 1.0
# Leaving waits no longer for Redis; the lease then ends by itself.
LET_GO_TIMEOUT_S = 2.0
# The rows that a batch has done outlive its end by so long: a Redis that lost its last second may not know of the end.
WORK_TTL_MS = 3600 * 1000
BATCH_TTL_MS = 90 * 24 * 3600 * 1000

Fields = dict[str, str | int | bytes]


class Interruption(enum.Enum):
    """Why a run ends before its last row."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Lease:
    """The lease of one batch, held inside ``async with``: renewed, and let go at the end.

    Attributes:
        epoch: how often the batch was taken, this time included.
        interruption: done when the run is to end early; an exception in it is why the lease could not be kept.
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
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._renewing is not None
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        if self.interruption.done() and not self.interruption.cancelled():
            self.interruption.exception()  # heard, should nobody else have
        # What cannot be let go ends by itself; why, is told by what the block itself ran into.
        with contextlib.suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(LET_GO_TIMEOUT_S):
                await self._write(ttl_ms=0)

    async def write(
        self, status: BatchStatus | None = None, fields: Fields | None = None, files: Sequence[FileRecord] = ()
    ) -> BatchStatus:
        """Write fields, and with them go to ``status`` and make ``files``: all of it or nothing. Returns the status.

        What is returned is not ``status`` if the batch was cancelled meanwhile; nothing was written then.

        Raises:
            BatchTakenOverError: another runner has taken the batch.
        """
        status_now, _ = await self._write(status, fields, files, ttl_ms=self._ttl_ms)
        return status_now

    async def close(self) -> bool:
        """The end was told: the batch is open no more. Returns whether it was still ours."""
        keys = [self._keys.batch(self.spec.id), self._keys.open]
        args = [self.spec.id, self.holder, BATCH_TTL_MS]
        return bool(await self._connection.run_script(SCRIPTS["close"], keys, args))

    async def _renew(self) -> None:
        """Renew until the end of the block, also while the run is ending."""
        interval_s = min(RENEW_INTERVAL_S, self._ttl_ms / 3000)
        while True:
            await asyncio.sleep(interval_s)
            try:
                status, now_s = await self._write(fields=self.counts(), ttl_ms=self._ttl_ms)
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

    async def _write(
        self,
        status: BatchStatus | None = None,
        fields: Fields | None = None,
        files: Sequence[FileRecord] = (),
        *,
        ttl_ms: int,
    ) -> tuple[BatchStatus, float]:
        """Returns the status, and the time by Redis in seconds."""
        batch_id, given = self.spec.id, fields or {}
        keys = [self._keys.batch(batch_id), self._keys.open, self._keys.garbage, self._keys.files(self.spec.tenant)]
        keys += [self._keys.file(record.file.id) for record in files]
        args: list[Any] = [
            batch_id,
            self.holder,
            ttl_ms,
            "" if status is None else status.value,
            WORK_TTL_MS,
            len(given),
        ]
        for name, value in given.items():
            args += (name, value)
        for record in files:
            args += file_args(record, record.file.created_at)
        answer = await self._connection.run_script(SCRIPTS["write"], keys, args)
        if answer[0] == b"stale":
            raise BatchTakenOverError(
                f"batch {shown(batch_id)} was taken over by another runner, which goes on with it"
            )
        found = BatchStatus(answer[1].decode())
        if answer[0] == b"refused" and found is not BatchStatus.CANCELLING:
            raise BrokerError(f"batch {shown(batch_id)} is {found}, and cannot become {status}")
        return found, answer[2] / 1000
