"""The partitions of its model, as an engine serves them: most models have one.

An engine begins with its homes (``shared/partitions/homes.py``). If they leave it room, it helps out where most waits,
and then says everywhere that it has room, so that what comes anywhere can wake it. A partition whose Redis is away is
set aside until it answers, so that it keeps nobody from the others.
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
from ..publisher import Publisher
from ..redis_pressure import RedisPressure

# Within shared.partitions.layout.MAX_AGE_S a new partition is served.
LOOK_EVERY_S = 3.0
# How often an engine with room asks what waits where it has said that it has room; wakes come at once.
COUNT_EVERY_S = 0.1
COUNT_PATIENCE_S = 0.25
# A claim that takes longer is looked for later; with one partition there is nothing else to do meanwhile.
CLAIM_PATIENCE_S = 1.0
REDIS_PAUSE_S = 0.2


class ServedPartition:
    """One of them.

    Attributes:
        may_hold_unseen: a claim of this engine, also of its former life, may have been carried out of which it knows
            nothing; ``looked_for_unseen_at`` is when that was last looked for.
        claimed_at: when a claim, which renews the lease, was last answered.
        has_our_room: the server counts on room of this engine.
        is_woken: something has come for this engine since its last claim.
        is_away: its Redis does not answer.
    """

    def __init__(self, broker: Broker, publisher: Publisher, pressure: RedisPressure) -> None:
        self.number = broker.partition
        self.broker = broker
        self.publisher = publisher
        self._pressure = pressure
        self.may_hold_unseen = True
        self.looked_for_unseen_at = time.monotonic()
        self.claimed_at = 0.0
        self.has_our_room = False
        self.is_woken = False
        self.is_away = False

    def has_claimed_within(self, seconds: float) -> bool:
        return time.monotonic() - self.claimed_at < seconds

    async def run(self) -> None:
        """Publish until cancelled."""
        await asyncio.gather(self.publisher.run(), self._pressure.run())


class ServedPartitions:
    """All of them; there is at least the first.

    Args:
        make: makes the partition of a number.
        read_layout: asks home for the model's layout.
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
        """How long a claim may take; None for as long as it takes."""
        return None if len(self._parts) == 1 else CLAIM_PATIENCE_S

    async def look(self) -> list[ServedPartition]:
        """Ask for the layout, and for the engines that share it; returns the partitions that are new."""
        layout, num_known = await self._read_layout(), len(self._parts)
        self._num_known = layout.num_known
        self._parts += [self._make(number) for number in range(num_known, layout.num_known)]
        if layout.num_known > 1:
            await self._note_engines()
        return self._parts[num_known:]

    def drop_retired(self, holds_some: Callable[[ServedPartition], bool]) -> list[ServedPartition]:
        """Return what the model does not have any more, and serve it no more; not while this engine runs some of it."""
        dropped: list[ServedPartition] = []
        while len(self._parts) > self._num_known and not holds_some(self._parts[-1]):
            dropped.append(self._parts.pop())
        return dropped

    async def _note_engines(self) -> None:
        """Each engine holds a lease everywhere, so any partition that answers can tell."""
        answering = next((part for part in self._parts if not part.is_away), self._parts[0])
        with suppress(TimeoutError, PenstockError):  # then they are taken to be those that were there
            async with asyncio.timeout(CLAIM_PATIENCE_S):
                self._engines = sorted({*await answering.broker.engines(), self._engine_id})

    def homes(self) -> list[ServedPartition]:
        """Return the partitions to claim from first, in order."""
        return [part for part in self._next_homes() if not part.is_away]

    async def others(self) -> list[ServedPartition]:
        """Return those to claim from if there is still room: where something came, where most waits, where nobody knows
        of the room of this engine."""
        homes = self._homes()
        others = [part for part in self._parts if part not in homes and not part.is_away]
        if not others:
            return others
        woken = [part for part in others if part.is_woken]
        fullest = await self._fullest([part for part in others if not part.is_woken])
        return [*dict.fromkeys((*woken, *fullest, *(part for part in others if not part.has_our_room)))]

    async def withdraw(self, *, also_homes: bool = True) -> None:
        """Let nobody count on this engine's room, where somebody may."""
        homes = () if also_homes else self._homes()
        await asyncio.gather(*(self._withdraw(part) for part in self._parts if part not in homes))

    async def _withdraw(self, part: ServedPartition) -> None:
        if part.has_our_room and not part.is_away:
            with suppress(TimeoutError):  # who counts on it meanwhile finds out
                async with asyncio.timeout(self.patience_s):
                    await part.broker.withdraw(self._engine_id)
        part.has_our_room = False

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
        """Return those in which something waits, the most first."""
        now = time.monotonic()
        if not parts or now - self._counted_at < COUNT_EVERY_S:
            return []
        self._counted_at = now
        counts: dict[int, int] = {}

        async def count(part: ServedPartition) -> None:
            with suppress(TimeoutError, PenstockError):  # nobody helps out where it cannot be asked
                async with asyncio.timeout(COUNT_PATIENCE_S):
                    counts[part.number] = await part.broker.count_waiting()

        await asyncio.gather(*map(count, parts))
        waiting = [part for part in parts if counts.get(part.number)]
        return sorted(waiting, key=lambda part: -counts[part.number])
