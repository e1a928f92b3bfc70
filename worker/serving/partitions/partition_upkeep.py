"""Background work in every partition that an engine serves: renew its lease, subscribe to its channels, write deltas.

The partitions are handled concurrently, so that an unreachable Redis does not delay the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ....shared.connection import Subscriber, Subscription
from ....shared.process.side_by_side import SideBySide
from ..claiming import ClaimLoop
from ..requests.running_generations import RunningGenerations
from .served_partitions import REFRESH_EVERY_S, ServedPartition, ServedPartitions

LEASE_RENEWALS_PER_TTL = 3
NO_TIMEOUT_S = 1e6


class PartitionUpkeep:
    """Leases, subscriptions and publishers of all partitions of one engine.

    Call ``take_leases``, ``begin``, ``run`` until cancelled, ``stop``, ``end``, in this order.

    Args:
        on_command: called with each encoded command to the engine.
        on_stale: called with partition, request_id and epoch of each claim that a renewal showed to be stale.
    """

    def __init__(
        self,
        engine_id: str,
        parts: ServedPartitions,
        live: RunningGenerations,
        claiming: ClaimLoop,
        subscriber: Subscriber,
        on_command: Callable[[bytes], None],
        on_stale: Callable[[int, str, int], None],
        *,
        lease_ttl_s: float,
    ) -> None:
        self._engine_id = engine_id
        self._parts = parts
        self._live = live
        self._claiming = claiming
        self._subscriber = subscriber
        self._on_command = on_command
        self._on_stale = on_stale
        self._lease_ttl_s = lease_ttl_s
        self._renewals = SideBySide(self._renew)
        self._attentions = SideBySide(self._serve_partition)
        self._publishing: dict[ServedPartition, asyncio.Task[None]] = {}
        self._subscriptions: dict[ServedPartition, list[Subscription]] = {}
        self._has_another = asyncio.Event()

    async def take_leases(self) -> None:
        """Acquire the engine's lease in all partitions; ``run`` renews it."""
        await self._parts.refresh()
        await self._renew_all(self._parts, self._parts.patience_s or NO_TIMEOUT_S)

    async def begin(self) -> None:
        """Subscribe to this engine's channels and start to publish; later where a Redis is unreachable."""
        await self._attend_all(self._parts)

    async def run(self) -> None:
        """Renew leases, and serve partitions added to the model. Raises the exception that ends a publisher."""
        works = [
            asyncio.create_task(work)
            for work in (self._renew_forever(), self._refresh_forever(), self._watch_publishers())
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in works:
                task.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def flush(self, part: ServedPartition) -> None:
        """Wait until everything published to ``part`` is in Redis, unless its publisher has ended."""
        publishing = self._publishing.get(part)
        if publishing is None or publishing.done():
            return
        flushing = asyncio.create_task(part.publisher.flush())
        await asyncio.wait([flushing, publishing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()

    async def stop(self) -> None:
        """Stop renewing, because a released lease must not return. A second call does nothing."""
        await asyncio.gather(self._renewals.close(), self._attentions.close())

    async def end(self) -> None:
        """Stop publishing. A second call does nothing."""
        for task in self._publishing.values():
            task.cancel()
        await asyncio.gather(*self._publishing.values(), return_exceptions=True)

    async def _attend_all(self, parts: Iterable[ServedPartition]) -> None:
        for error in await self._attentions.round(parts, self._parts.patience_s or NO_TIMEOUT_S):
            raise error

    async def _serve_partition(self, part: ServedPartition) -> None:
        keys = part.broker.keys

        def wake_claiming(_: object = None) -> None:
            self._claiming.wake_at(part)

        self._publishing[part] = asyncio.create_task(part.run())
        self._has_another.set()
        subscribed = self._subscriptions.setdefault(part, [])
        wakes = keys.engine_wake(self._engine_id), keys.wake
        subscribed += await asyncio.gather(
            *(self._subscriber.subscribe(channel, wake_claiming, wake_claiming) for channel in wakes),
            self._subscriber.subscribe(keys.engine_commands(self._engine_id), self._on_command),
        )

    async def _leave_partition(self, part: ServedPartition) -> None:
        """Stop serving a partition that was removed from the model; its lease expires."""
        for subscription in self._subscriptions.pop(part, []):
            self._subscriber.unsubscribe(subscription)
        publishing = self._publishing.pop(part, None)
        if publishing is not None:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    async def _watch_publishers(self) -> None:
        """Raise the exception that ends a publisher, as soon as one ends."""
        while True:
            self._has_another.clear()
            another = asyncio.create_task(self._has_another.wait())
            done, _ = await asyncio.wait([another, *self._publishing.values()], return_when=asyncio.FIRST_COMPLETED)
            another.cancel()
            for task in done & {*self._publishing.values()}:
                task.result()

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_EVERY_S)
            if added := await self._parts.refresh():
                await self._renew_all(added, 0.0)
                await self._attend_all(added)
                self._claiming.wake()
            for part in self._parts.drop_retired(lambda part: bool(self._live.claims(part.number))):
                await self._leave_partition(part)

    async def _renew_forever(self) -> None:
        interval_s = self._lease_ttl_s / LEASE_RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(interval_s)
            # An idle engine polls for requests, which renews its lease too.
            due = [part for part in self._parts if len(self._live) or not part.has_claimed_within(2 * interval_s)]
            await self._renew_all(due, interval_s / 2)

    async def _renew_all(self, parts: Iterable[ServedPartition], patience_s: float) -> None:
        for error in await self._renewals.round(parts, patience_s):
            raise error

    async def _renew(self, part: ServedPartition) -> None:
        claims = self._live.claims(part.number)
        stale = set(await part.broker.renew(self._engine_id, claims, lease_ttl_ms=int(self._lease_ttl_s * 1000)))
        for request_id, epoch in claims:
            if request_id in stale:
                self._on_stale(part.number, request_id, epoch)
