"""Requests with one answer, as the broker knows them. A request for ``n`` answers is ``n`` of these (``fan_out``)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypedDict

import msgspec

from ...shared.broker import NEW, UNSERVED, Broker, Entry
from ...shared.connection import CommandConnection, Subscriber
from ...shared.errors import PenstockError, RefusedForNowError, RequestLostError
from ...shared.keys import Keys
from ...shared.messages.deltas import Delta
from ...shared.messages.requests import EngineCoreRequest
from ...shared.partitions import Layouts, PartitionedBroker
from ...shared.process.log import get_logger
from ..inputs.options import read_ttl_of
from ..webhooks.targets import WebhookTargets
from .enqueuer import Enqueuer, EnqueueSpans
from .health import Health
from .lease import ClientLease, ClientLifecycle, InteractiveRequest, ended_when_due, lingering
from .log_checks import LogChecks, SilenceWatch
from .queue_entry import Outgoing
from .read_results import ReadResults
from .reader import DeltaReader, without_error

log = get_logger(__name__)


class FollowOptions(TypedDict, total=False):
    """Options of following a request: ``after`` and ``border`` of ``DeltaReader``, ``linger_s`` of a handle."""

    after: int
    border: int
    linger_s: float | None


class InteractiveDeltas:
    """Deltas of a request that runs as long as its caller reads them. Raises the error that a delta carries.

    Args:
        send_again: enqueues the request again if Redis has lost it; None if another client enqueued it.
    """

    def __init__(
        self, reader: DeltaReader, health: Health, model: str, send_again: Callable[[], Awaitable[object]] | None
    ) -> None:
        self._reader = reader
        self._health = health
        self._model = model
        self._send_again = send_again

    def __aiter__(self) -> InteractiveDeltas:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                delta = without_error(await anext(self._reader))
            except RequestLostError:
                if self._send_again is None:
                    raise
                await self._send_again()
                self._reader.catch_up()
                continue
            # A request of another client may have ended long ago, so it proves nothing about the engines of today.
            if self._send_again is not None and delta.token_ids:
                self._health.saw_alive(self._model)
            return delta

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` instead of the next delta."""
        self._reader.fail(error)


class SingleRequests:
    """Enqueues single requests, detached or interactive, and follows them.

    Attributes:
        lifecycle: process and event loop in which the connections are open; set by the client.
    """

    def __init__(
        self,
        commands: CommandConnection,
        subscriber: Subscriber,
        keys: Keys,
        health: Health,
        lease: ClientLease,
        *,
        result_ttl_ms: int,
        fail_fast: bool,
        max_payload_bytes: int,
        spans: EnqueueSpans,
    ) -> None:
        self.lifecycle = ClientLifecycle()
        self._spans = spans
        self._commands = commands
        self._subscriber = subscriber
        self._keys = keys
        self._health = health
        self._lease = lease
        self._result_ttl_ms = result_ttl_ms
        self._fail_fast = fail_fast
        self._max_payload_bytes = max_payload_bytes
        self._read_results = ReadResults()
        self._targets = WebhookTargets(commands, keys)
        self._silences = SilenceWatch(commands, keys)
        self._log_checks = LogChecks(commands)
        self._layouts = Layouts(commands, keys)
        self._brokers: dict[str, PartitionedBroker] = {}
        self._enqueuers: dict[Broker, Enqueuer] = {}

    async def close(self) -> None:
        """Stop checking logs, and write the pending lifetimes of results."""
        await self._log_checks.close()
        await self._read_results.close()

    def broker(self, model: str) -> PartitionedBroker:
        """Return the broker of one model, over all its partitions."""
        broker = self._brokers.get(model)
        if broker is None:
            broker = self._brokers[model] = PartitionedBroker(self._commands, self._keys, model, self._layouts)
        return broker

    async def run(self, outgoing: Outgoing) -> AsyncGenerator[Delta]:
        """Enqueue an interactive request and yield its deltas. Leaving early cancels it."""
        async with self.interactive(outgoing) as deltas:
            async for delta in deltas:
                yield delta

    @asynccontextmanager
    async def interactive(self, outgoing: Outgoing) -> AsyncGenerator[InteractiveDeltas]:
        """Enqueue an interactive request. The block reads its deltas, and leaving it early cancels the request.

        Subscription and request are sent at the same time, on two connections. If the first token is published before
        the subscription, the log has it: see ``LogChecks``.
        """
        self.lifecycle.check()
        request, options = outgoing.request, outgoing.options
        read_ttl_s = read_ttl_of(options.get("read_ttl_s"), request_id=options.get("request_id"))
        broker = await self._expected(request)
        reader = DeltaReader(broker, self._subscriber, request.request_id)
        interactive: InteractiveRequest | None = None
        is_ours = False
        try:
            await reader.begin()
            enqueueing = asyncio.create_task(self._enqueue_somewhere(outgoing, broker))
            linger_ms = int((options.get("linger_s") or 0) * 1000)
            interactive = InteractiveRequest(broker, request.request_id, enqueueing, linger_ms=linger_ms)
            self._lease.hold(interactive)
            with self._health.watching(request.model), ended_when_due(interactive, outgoing.due_in_s):
                is_ours = await interactive.is_ours()
                await reader.subscribed()
                await reader.follow_at(interactive.broker)
                if is_ours:
                    reader.expect_first_record()
                    self._log_checks.add(reader)
                else:
                    self._lease.let_go(interactive)
                    reader.catch_up()
                send_again = partial(self._send_again, outgoing) if is_ours and not request.resumable else None
                with self._silences.watching(reader):
                    yield InteractiveDeltas(reader, self._health, request.model, send_again)
        finally:
            reader.close()
            if interactive is not None:
                if not reader.ended and self.lifecycle.is_open:
                    await interactive.leave()
                elif reader.ended and is_ours and read_ttl_s is not None:
                    self._read_results.add(interactive.broker, request.request_id, read_ttl_s)
                self._lease.let_go(interactive)

    async def follow(
        self, model: str, request_id: str, after: int = -1, *, border: int | None = None, linger_s: float | None = None
    ) -> AsyncGenerator[Delta]:
        """Yield the deltas of a request that is already enqueued. Leaving early cancels nothing."""
        self.lifecycle.check()
        broker = await self.broker(model).find(request_id)
        reader = DeltaReader(broker, self._subscriber, request_id, after, border=border)
        try:
            await reader.subscribe()
            reader.catch_up()
            lingers = lingering(broker, request_id, linger_s or 0.0)
            with self._health.watching(model), lingers, self._silences.watching(reader):
                async for delta in reader:
                    yield without_error(delta)
        finally:
            reader.close()

    async def submit(self, outgoing: Sequence[Outgoing]) -> None:
        """Enqueue detached requests of one model. If one fails, those that were enqueued are cancelled."""
        model, target = outgoing[0].request.model, outgoing[0].target
        if target is not None:
            await self._targets.admit(target)
        with self._health.watching(model), self._spans.around(outgoing):
            first = outgoing[0].request
            enqueuer = self._enqueuer(model, await self._expected(first))
            if len(outgoing) == 1:
                await self._answered(model, await enqueuer.enqueue(self._entry(outgoing[0])))
                return
            failures: list[PenstockError] = []

            def entries() -> Iterator[Entry]:
                try:
                    yield from map(self._entry, outgoing)
                except PenstockError as error:
                    failures.append(error)

            answers = await enqueuer.enqueue_many(entries())
            try:
                for answer in (*failures, *(answer for _, answer in answers)):
                    if isinstance(answer, BaseException):
                        raise answer
                    await self._answered(model, answer)
            except Exception:
                with contextlib.suppress(PenstockError):
                    enqueued = [entry.request_id for entry, answer in answers if answer == NEW]
                    await asyncio.gather(*map(self.broker(model).cancel, enqueued))
                raise

    async def _expected(self, request: EngineCoreRequest) -> Broker:
        return await self.broker(request.model).expected(request.tenant, request.request_id, request.session_id or "")

    def _entry(self, outgoing: Outgoing, **lease: Any) -> Entry:
        return outgoing.entry(
            result_ttl_ms=self._result_ttl_ms,
            fail_fast=self._fail_fast,
            max_payload_bytes=self._max_payload_bytes,
            **lease,
        )

    def _enqueuer(self, model: str, expected: Broker) -> Enqueuer:
        """Return the enqueuer of one partition. One that is away must not block the others."""
        enqueuer = self._enqueuers.get(expected)
        if enqueuer is None:
            enqueuer = self._enqueuers[expected] = Enqueuer(self.broker(model))
        return enqueuer

    async def _enqueue(self, outgoing: Outgoing, expected: Broker, *, timeout_ms: int | None = None) -> bool:
        """Enqueue an interactive request. Returns True if it is new, False if its id was known.

        Args:
            expected: partition that it presumably belongs to.
            timeout_ms: rest of its timeout, if that has begun already.
        """
        model = outgoing.request.model
        with self._spans.around([outgoing]):
            entry = self._entry(outgoing, client_id=self._lease.client_id, client_ttl_ms=self._lease.ttl_ms)
            if timeout_ms is not None:
                entry = msgspec.structs.replace(entry, timeout_ms=timeout_ms)
            return await self._answered(model, await self._enqueuer(model, expected).enqueue(entry))

    async def _enqueue_somewhere(self, outgoing: Outgoing, expected: Broker) -> tuple[bool, Broker]:
        """Enqueue as ``_enqueue``, and return also the partition of the request."""
        is_new = await self._enqueue(outgoing, expected)
        return is_new, self.broker(outgoing.request.model).where(outgoing.request.request_id)

    async def _send_again(self, outgoing: Outgoing) -> None:
        """Enqueue an interactive request again that Redis has lost, with its id and its seed.

        The reader compares the new output with the delivered tokens. The request was accepted once, so a temporary
        refusal is retried.
        """
        request = outgoing.request
        log.warning("request_sent_again", request_id=request.request_id, model=request.model)
        expected = self.broker(request.model).where(request.request_id)
        while True:
            try:
                await self._enqueue(outgoing, expected, timeout_ms=_left_ms(outgoing))
                return
            except RefusedForNowError as error:
                await asyncio.sleep(error.retry_after_s)

    async def _answered(self, model: str, answer: str) -> bool:
        if answer == UNSERVED:
            raise await self._health.unserved(model)
        return answer == NEW


def _left_ms(outgoing: Outgoing) -> int | None:
    """Return the rest of a timeout, which was running while Redis lost the request; None without a timeout.

    A deadline needs no such value, because it is a time of Redis's clock.
    """
    if outgoing.options.get("timeout_s") is None or outgoing.due_in_s is None:
        return None
    return max(1, math.ceil(1000 * outgoing.due_in_s))
