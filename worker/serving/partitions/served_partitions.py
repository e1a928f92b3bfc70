"""The partitions of a model, as one engine serves them; most models have one.

An engine claims from its home partitions first (``shared/partitions/layout.py``). If it still has capacity, it claims
from the partitions with the longest queues, and then registers its capacity in all partitions, so that a request in any
of them can wake it. A partition whose Redis is unreachable is skipped until it answers, so that it does not delay the
others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from ....shared.broker import Broker
from ....shared.errors import PenstockError
from ....shared.partitions import Layout, home_order
from ....shared.process.waiting import wait_at_most
from ..publisher import Publisher
from ..redis_waiting import RedisPressure

# Shorter than shared.partitions.layout.MAX_AGE_S, within which a new partition must be served.
REFRESH_EVERY_S = 3.0
# How often an engine with capacity counts the queues of other partitions; a wake needs no count.
COUNT_EVERY_S = 0.1
COUNT_PATIENCE_S = 0.25
# A claim that takes longer is checked later. With one partition the engine has nothing else to do meanwhile.
CLAIM_PATIENCE_S = 1.0
REDIS_PAUSE_S = 0.2


class ServedPartition:
    """A partition of the model.

    Attributes:
        may_hold_unknown: whether Redis may list claims of this engine, or of its previous process, that the engine
            does not know.
        unknown_checked_at: when Redis was last asked for such claims.
        claimed_at: when a claim, which renews the lease, was last answered.
        has_our_capacity: whether the server has registered capacity of this engine.
        is_woken: whether a request for this engine has arrived since its last claim.
        is_away: whether its Redis does not answer.
    """

    def __init__(self, broker: Broker, publisher: Publisher, pressure: RedisPressure) -> None:
        self.number = broker.partition
        self.broker = broker
        self.publisher = publisher
        self._pressure = pressure
        self.may_hold_unknown = True
        self.unknown_checked_at = time.monotonic()
        self.claimed_at = 0.0
        self.has_our_capacity = False
        self.is_woken = False
        self.is_away = False

    def has_claimed_within(self, seconds: float) -> bool:
        return time.monotonic() - self.claimed_at < seconds

    async def run(self) -> None:
        """Publish until cancelled."""
        await asyncio.gather(self.publisher.run(), self._pressure.run())


class ServedPartitions:
    """All partitions of the model, at least the first.

    Args:
        make: creates the partition with a number.
        read_layout: reads the model's layout from the home Redis.
    """

    def __init__(
        self, engine_id: str, make: Callable[[int], ServedPartition], read_layout: Callable[[], Awaitable[Layout]]
    ) -> None:
        self._engine_id = engine_id
        self._make = make
        self._read_layout = read_layout
        self._parts = [make(0)]
        self._engines = [engine_id]
        self._turn = 0
        self._num_known = 1
        self._counted_at = -math.inf

    def __iter__(self) -> Iterator[ServedPartition]:
        return iter([*self._parts])

    def __getitem__(self, number: int) -> ServedPartition:
        return self._parts[number]

    @property
    def patience_s(self) -> float | None:
        """Longest duration of a claim; None without a limit."""
        return None if len(self._parts) == 1 else CLAIM_PATIENCE_S

    async def refresh(self) -> list[ServedPartition]:
        """Read the layout and the engines that share it. Returns the new partitions."""
        layout, num_known = await self._read_layout(), len(self._parts)
        self._num_known = layout.num_known
        self._parts += [self._make(number) for number in range(num_known, layout.num_known)]
        if layout.num_known > 1:
            await self._read_engines()
        return self._parts[num_known:]

    def drop_retired(self, holds_some: Callable[[ServedPartition], bool]) -> list[ServedPartition]:
        """Stop serving partitions that were removed from the model, and return them.

        Args:
            holds_some: whether this engine still runs requests of a partition, which is then kept.
        """
        dropped: list[ServedPartition] = []
        while len(self._parts) > self._num_known and not holds_some(self._parts[-1]):
            dropped.append(self._parts.pop())
        return dropped

    async def _read_engines(self) -> None:
        """Read the engines of the model from any partition that answers, since each engine has a lease in all."""
        answering = next((part for part in self._parts if not part.is_away), self._parts[0])
        with suppress(TimeoutError, PenstockError):  # the engines of the last read are assumed
            async with asyncio.timeout(CLAIM_PATIENCE_S):
                self._engines = sorted({*await answering.broker.engines(), self._engine_id})

    def homes(self) -> list[ServedPartition]:
        """Return the partitions to claim from first, in order."""
        return [part for part in self._next_homes() if not part.is_away]

    async def others(self) -> list[ServedPartition]:
        """Return the partitions to claim from if capacity remains after the homes.

        The order is: partitions that woke this engine, those with the longest queues, and those in which the
        capacity of this engine is not registered.
        """
        homes = self._homes()
        others = [part for part in self._parts if part not in homes and not part.is_away]
        if not others:
            return others
        woken = [part for part in others if part.is_woken]
        fullest = await self._fullest([part for part in others if not part.is_woken])
        return [*dict.fromkeys((*woken, *fullest, *(part for part in others if not part.has_our_capacity)))]

    async def withdraw(self, *, also_homes: bool = True) -> None:
        """Withdraw this engine's capacity from the partitions that have registered it."""
        homes = () if also_homes else self._homes()
        await asyncio.gather(*(self._withdraw(part) for part in self._parts if part not in homes))

    async def _withdraw(self, part: ServedPartition) -> None:
        if part.has_our_capacity and not part.is_away:
            await wait_at_most(self.patience_s, part.broker.withdraw(self._engine_id))  # a wake in vain is harmless
        part.has_our_capacity = False

    def _next_homes(self) -> list[ServedPartition]:
        self._turn += 1
        return self._homes()

    def _homes(self) -> list[ServedPartition]:
        num = len(self._parts)
        if num == 1:
            return self._parts
        rank = self._engines.index(self._engine_id)
        return [self._parts[number] for number in home_order(rank, len(self._engines), num, self._turn)]

    async def _fullest(self, parts: list[ServedPartition]) -> list[ServedPartition]:
        """Return the partitions that have queued requests, in order of decreasing number."""
        now = time.monotonic()
        if not parts or now - self._counted_at < COUNT_EVERY_S:
            return []
        self._counted_at = now
        counts: dict[int, int] = {}

        async def count(part: ServedPartition) -> None:
            with suppress(TimeoutError, PenstockError):  # a partition that does not answer is skipped
                async with asyncio.timeout(COUNT_PATIENCE_S):
                    counts[part.number] = await part.broker.count_waiting()

        await asyncio.gather(*map(count, parts))
        waiting = [part for part in parts if counts.get(part.number)]
        return sorted(waiting, key=lambda part: -counts[part.number])
