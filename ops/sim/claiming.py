"""Claims of an engine in virtual time, as ``ClaimLoop`` and ``ServedPartitions`` of worker/serving make them.

An engine claims first from its home partitions. If it has capacity left, it claims from partitions with new requests,
from the longest queues, and from those where Redis does not know its capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec
import simpy

from ...shared.broker import Claim, Wave
from ...shared.partitions import home_order
from .running import Running, capacity_of
from .scenario import Engines
from .world import Partition, Process, World

# As REFRESH_EVERY_S and COUNT_EVERY_S of worker/serving/partitions/served_partitions.py.
LOOK_EVERY_S, COUNT_EVERY_S = 3.0, 0.1

Round = Generator[simpy.Event, Any, tuple[float, bool]]


class EngineSlot:
    """An engine at one partition: whether Redis knows its capacity, whether it was woken, when it claimed."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.has_our_capacity = False
        self.is_woken = False
        self.claimed_s = 0.0


class Claims:
    """Claim loop of an engine. ``running`` has its requests; ``admit`` gets claimed ones and their partition."""

    def __init__(
        self,
        world: World,
        engine_id: str,
        kind: Engines,
        running: dict[str, Running],
        admit: Callable[[Claim, Partition], None],
    ) -> None:
        self._world, self._env = world, world.env
        self._engine_id = engine_id
        self._kind = kind
        self._running = running
        self._admit = admit
        self.seats = [EngineSlot(partition) for partition in world.partitions]
        self.is_claiming = True
        # Requests that it may claim now; None without a limit.
        self.max_new: int | None = None
        self._wake = self._env.event()
        self._woken_by = "start"
        self._engines: list[str] = []
        self._looked_s = self._counted_s = -math.inf
        self._turn = 0
        self._may_retry = False

    def listen(self) -> None:
        """Subscribe to wakes of this engine."""
        for seat in self.seats:
            seat.partition.listen(seat.partition.keys.engine_wake(self._engine_id), lambda own=seat: self.wake(own))

    def leave(self) -> None:
        """Stop claiming, and unsubscribe."""
        self.stop()
        for seat in self.seats:
            seat.partition.listen(seat.partition.keys.engine_wake(self._engine_id), None)

    def stop(self) -> None:
        """Stop claiming."""
        self.is_claiming = False
        if not self._wake.triggered:
            self._wake.succeed()

    def wake(self, seat: EngineSlot | None = None, cause: str = "wake") -> None:
        """Claim again, because requests arrived at a partition, or capacity was freed."""
        if seat is not None:
            seat.is_woken = True
        if not self._wake.triggered:
            self._woken_by = cause
            self._wake.succeed()

    def withdraw(self, seats: Iterable[EngineSlot]) -> None:
        """Withdraw the engine's announced capacity at these partitions."""
        for seat in seats:
            if seat.has_our_capacity and not seat.partition.is_away:
                seat.partition.do(seat.partition.broker.withdraw(self._engine_id))
            seat.has_our_capacity = False

    def run(self) -> Process:
        """Claim until ``stop``."""
        cause = "start"
        while self.is_claiming:
            self._wake = self._env.event()
            self._may_retry = False
            wait_s, goes_on = yield from self._claim_from(self._homes(), cause)
            if goes_on:
                others_wait_s, _ = yield from self._claim_from(self._others(), cause)
                wait_s = min(wait_s, others_wait_s)
            if not self.is_claiming:
                return
            if not self._has_capacity():
                homes = self._homes()
                self.withdraw([seat for seat in self.seats if seat not in homes])
            yield self._wake | self._env.timeout(wait_s)
            cause = self._woken_by if self._wake.triggered else "retry" if self._may_retry else "idle"

    def _claim_from(self, seats: list[EngineSlot], cause: str) -> Round:
        """Claim from each while capacity is left. Return the time to wait, and whether to try other partitions."""
        wait_s = Wave([]).wait_s
        for seat in seats:
            yield self._env.timeout(self._world.round_trip_s)
            if len(self.seats) == 1:
                yield from seat.partition.redis()
            elif seat.partition.is_away:
                continue
            if not self.is_claiming or not self._has_capacity():
                return wait_s, False
            wave = self._claim(seat, cause)
            wait_s = min(wait_s, wave.wait_s)
            self._may_retry = self._may_retry or wave.retry_ms >= 0
            for claim in wave.claims:
                self._admit(claim, seat.partition)
            if wave.is_saving:
                return wait_s, False
        return wait_s, len(self.seats) > 1 and self._has_capacity()

    def _claim(self, seat: EngineSlot, cause: str) -> Wave:
        seat.is_woken, seat.has_our_capacity = False, True
        room = capacity_of(self._kind, self._running.values())
        if self.max_new is not None:
            room = msgspec.structs.replace(room, max_num_seqs=min(room.max_num_seqs, room.num_seqs + self.max_new))
        wave = seat.partition.do(seat.partition.broker.claim(self._engine_id, room))
        seat.claimed_s = self._env.now
        if self.max_new is not None:
            self.max_new -= len(wave.claims)
        measures = self._world.measures
        measures.num_claims[cause] += 1
        if not wave.claims:
            measures.num_wasted[cause] += 1
        return wave

    def _has_capacity(self) -> bool:
        has_probationer = any(one.is_on_probation for one in self._running.values())
        return len(self._running) < self._kind.max_num_seqs and not has_probationer and self.max_new != 0

    def _homes(self) -> list[EngineSlot]:
        if len(self.seats) == 1:
            return self.seats
        if self._env.now - self._looked_s >= LOOK_EVERY_S:
            answering = next((seat.partition for seat in self.seats if not seat.partition.is_away), None)
            if answering is not None:
                self._engines = sorted({*answering.do(answering.broker.engines()), self._engine_id})
                self._looked_s = self._env.now
        self._turn += 1
        rank = self._engines.index(self._engine_id)
        return [self.seats[number] for number in home_order(rank, len(self._engines), len(self.seats), self._turn)]

    def _others(self) -> list[EngineSlot]:
        homes = self._homes()
        others = [seat for seat in self.seats if seat not in homes and not seat.partition.is_away]
        woken = [seat for seat in others if seat.is_woken]
        fullest = self._fullest([seat for seat in others if not seat.is_woken])
        return [*dict.fromkeys((*woken, *fullest, *(seat for seat in others if not seat.has_our_capacity)))]

    def _fullest(self, seats: list[EngineSlot]) -> list[EngineSlot]:
        if not seats or self._env.now - self._counted_s < COUNT_EVERY_S:
            return []
        self._counted_s = self._env.now
        counts = {seat: seat.partition.do(seat.partition.broker.count_waiting()) for seat in seats}
        return sorted((seat for seat in seats if counts[seat]), key=lambda seat: -counts[seat])
