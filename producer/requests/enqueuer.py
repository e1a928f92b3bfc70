"""Enqueues requests of many tasks in one call. While a call runs, the next requests are collected.

Each call is a span: a child of the spans of gateways and apps, and the parent of engines' spans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from ...shared.broker import Entry
from ...shared.errors import PenstockError
from ...shared.partitions import PartitionedBroker
from .queue_entry import Outgoing

# A call blocks the server for about 10 microseconds per request, plus the time for its bytes.
MAX_ENTRIES = 128
MAX_BYTES = 4 * 1024 * 1024
MAX_CALLS_OF_MANY = 4


class Enqueuer:
    """Enqueues requests of one model."""

    def __init__(self, broker: PartitionedBroker) -> None:
        self._broker = broker
        self._waiting: list[tuple[Entry, asyncio.Future[str]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def enqueue(self, entry: Entry) -> str:
        """Return the broker's answer. Raises the error that refused the request, or the error of the call."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_waiting())
        return await answer

    async def enqueue_many(self, entries: Iterable[Entry]) -> list[tuple[Entry, str | BaseException]]:
        """Return each entry with the broker's answer, with the error that refused it, or with the error of its call.

        Entries are read from the iterable while the server handles earlier ones.
        """
        slots = asyncio.Semaphore(MAX_CALLS_OF_MANY)
        calls: list[asyncio.Task[list[tuple[Entry, str | BaseException]]]] = []

        async def call(batch: Sequence[Entry]) -> list[tuple[Entry, str | BaseException]]:
            try:
                return list(zip(batch, await self._broker.enqueue_many(batch), strict=True))
            except Exception as error:
                return [(entry, error) for entry in batch]
            finally:
                slots.release()

        for batch in _batches(entries):
            await slots.acquire()
            calls.append(asyncio.create_task(call(batch)))
            await asyncio.sleep(0)  # so that it is sent before the next batch is built
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                # A caller that gave up before the call is not enqueued.
                waiting = [(entry, answer) for entry, answer in self._waiting if not answer.done()]
                num_sent = len(next(_batches(entry for entry, _ in waiting), ()))
                batch, self._waiting = waiting[:num_sent], waiting[num_sent:]
                if batch:
                    await self._enqueue_batch(batch)
        finally:
            self._sending = None

    async def _enqueue_batch(self, batch: list[tuple[Entry, asyncio.Future[str]]]) -> None:
        try:
            replies = await self._broker.enqueue_many([entry for entry, _ in batch])
        except BaseException as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), reply in zip(batch, replies, strict=True):
            if answer.done():
                continue
            if isinstance(reply, PenstockError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Split ``entries`` into calls that block the server only briefly."""
    batch: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        num_bytes += entry.num_bytes
        if batch and (len(batch) == MAX_ENTRIES or num_bytes > MAX_BYTES):
            yield batch
            batch, num_bytes = [], entry.num_bytes
        batch.append(entry)
    if batch:
        yield batch


class EnqueueSpans:
    """No spans, for a client without tracing. Requests keep the ``trace_headers`` of their caller."""

    async def open(self) -> None:
        """Begin exporting, when the client connects."""

    async def close(self) -> None:
        """Export the remaining spans, for a short time at most. A second call does nothing."""

    def around(self, outgoing: Sequence[Outgoing]) -> AbstractContextManager[None]:
        """Return a context for the call that enqueues these requests. It sets the headers for engines' spans."""
        return nullcontext()
