"""Holds the rank of an engine in its data-parallel group, and announces between ranks that a wave has begun.

    join ──all ranks known──▶ the core starts and meets the others ──ready──▶ serve
      ▲                                                                        │ renewed each second
      └── the process is restarted ◀── the generation is over: the core ends ──┘

No rank leads: each rank announces the waves that it begins. The one exception is leaving: if all ranks should leave
(``leave`` of a renewal), the first rank passes that on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import structlog

from ...shared.connection import CommandConnection, Subscriber
from ...shared.deployment.groups import Membership, Place, Standing
from ...shared.keys import Keys
from ...shared.messages.core import (
    GroupStatus,
    LeaveWave,
    Ready,
    SchedulerStats,
    StartWave,
    WavePhase,
    WaveStarted,
    WaveState,
)
from ...shared.process.waiting import wait_at_most
from ..config.data_parallel import RankPlace
from ..config.engine_config import EngineConfig
from ..config.worker_config import WorkerConfig

# Between two checks for missing ranks, or for a free place.
JOIN_INTERVAL_S = 0.2
STANDBY_INTERVAL_S = 1.0
# The beginning of a wave is announced again until all ranks are in it, because pub/sub delivers once or not at all.
REPEAT_INTERVAL_S = 0.25
# How long the ranks may take to leave together.
LEAVE_TIMEOUT_S = 5.0
# Share of the stall timeout, so that the ranks notice a lost rank before the stall watch acts.
_TIMEOUT_SHARE = 0.75
_LEFT_BEHIND = {
    Standing.OVER: "a rank of its data-parallel group has exited",
    Standing.STALE: "its data-parallel group has started another generation without it",
}

log = structlog.get_logger()
_encoder = msgspec.msgpack.Encoder()


class RankCore(Protocol):
    """The part of a ``CoreClient`` that a member uses."""

    @property
    def dead(self) -> asyncio.Event: ...

    def tell(self, message: StartWave | LeaveWave) -> None: ...

    def end_for(self, reason: str) -> None: ...


class GroupMember:
    """``enter`` before the core starts, ``serve`` once it is ready, ``close`` at the end.

    Args:
        core: the client of the rank's core.
        report: called with the place and the wave whenever one of them has changed.

    Attributes:
        has_left: set when all ranks have left their waves for good. This process must end then, so that other engines
            resume its requests.
    """

    def __init__(
        self,
        config: WorkerConfig,
        commands: CommandConnection,
        subscriber: Subscriber,
        core: RankCore,
        report: Callable[[GroupStatus], None],
    ) -> None:
        self._config = config
        self._engine = config.engine
        self._commands = commands
        self._subscriber = subscriber
        self._core = core
        self._report = report
        keys = Keys(config.namespace).model(self._engine.model_name)
        self._channel = keys.group_waves(self._engine.data_parallel_group)
        ttl_ms = int(config.lease_ttl_s * 1000)
        self._membership = Membership(commands, keys, self._engine.data_parallel_group, config.engine_id, ttl_ms=ttl_ms)
        self.has_left = asyncio.Event()
        self._place: Place | None = None
        self._address = ""
        self._num_experts = 0
        self._is_serving = False
        self._wave = WaveState(0, WavePhase.IDLE)
        self._has_moved = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._calling: asyncio.Task[None] | None = None

    async def enter(self) -> EngineConfig:
        """Wait until all ranks of a generation are known; return the configuration of this one."""
        await self._subscriber.subscribe(self._channel, self._on_message)
        while True:
            self._place = place = await self._join()
            self._address = f"{self._engine.data_parallel_address}:{_free_port()}" if place.rank == 0 else ""
            address = await self._wait_for_others(place)
            if address is not None:
                break
        self._report_status()
        self._keeping = asyncio.create_task(self._keep(place))
        rank_place = RankPlace(
            generation=place.generation,
            rank=place.rank,
            size=place.size,
            address=address,
            timeout_s=self._config.stall_timeout_s * _TIMEOUT_SHARE,
        )
        return msgspec.structs.replace(self._engine, place=rank_place)

    async def serve(self, ready: Ready) -> None:
        """Report to the group that the core is ready, and pass messages about waves on to it from now on."""
        self._num_experts = ready.num_shared_experts
        self._is_serving = True
        if self._place is not None:
            await self._renew(self._place)

    def record_wave(self, stats: SchedulerStats | None) -> None:
        """Record the core's wave, and announce it to the other ranks if the core has begun it."""
        if stats is None or stats.wave is None or stats.wave == self._wave:
            return
        self._wave = stats.wave
        self._has_moved.set()
        self._report_status()
        if self._calling is not None:
            self._calling.cancel()
            self._calling = None
        if self._wave.phase is WavePhase.STARTING:
            self._calling = asyncio.create_task(self._announce(self._wave.wave))
        elif self._wave.phase is WavePhase.LEFT:
            self.has_left.set()

    async def leave(self, patience_s: float, immediately: asyncio.Event) -> None:
        """Make all ranks leave the group, this one for good.

        Args:
            patience_s: how long to wait for the end of the running wave.
            immediately: ends that wait.
        """
        if self._place is None or self._core.dead.is_set():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                hurry = asyncio.create_task(immediately.wait())
                await self._until({WavePhase.IDLE, WavePhase.PAUSED, WavePhase.LEFT}, hurry)
        self._core.tell(LeaveWave())
        await wait_at_most(LEAVE_TIMEOUT_S, self._until({WavePhase.LEFT}, asyncio.create_task(self._core.dead.wait())))

    async def close(self) -> None:
        """End the generation if this rank is part of one, because the other ranks cannot continue without it."""
        tasks = [task for task in (self._keeping, self._calling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._place is not None:
            await self._membership.finish(self._place)

    async def _join(self) -> Place:
        stands_by = False
        while (place := await self._membership.join(self._engine.data_parallel_size)) is None:
            if not stands_by:
                log.info("group_full", group=self._engine.data_parallel_group)
                stands_by = True
            await asyncio.sleep(STANDBY_INTERVAL_S)
        log.info(
            "group_joined",
            group=self._engine.data_parallel_group,
            generation=place.generation,
            rank=place.rank,
            size=place.size,
        )
        return place

    async def _wait_for_others(self, place: Place) -> str | None:
        """Return the address at which all ranks meet; None if this generation has ended before it began."""
        while True:
            renewal = await self._membership.renew(place, address=self._address)
            if renewal.is_full:
                return renewal.address
            if renewal.standing in _LEFT_BEHIND:
                return None
            await asyncio.sleep(JOIN_INTERVAL_S)

    async def _keep(self, place: Place) -> None:
        """Renew the place of the rank until its generation is over."""
        while True:
            await self._renew(place)
            await asyncio.sleep(self._config.lease_ttl_s / 3)

    async def _renew(self, place: Place) -> None:
        renewal = await self._membership.renew(
            place, address=self._address, serves=self._is_serving, num_experts=self._num_experts
        )
        if renewal.standing in _LEFT_BEHIND and not self.has_left.is_set():
            # At each renewal, because the core may not have started yet.
            self._core.end_for(_LEFT_BEHIND[renewal.standing])
        if renewal.standing is Standing.LEAVE and self._is_serving:
            self._core.tell(LeaveWave())

    async def _announce(self, wave: int) -> None:
        """Announce a wave that was begun here to the other ranks, until it is cancelled."""
        assert self._place is not None
        data = _encoder.encode(WaveStarted(self._place.generation, wave))
        while True:
            await self._commands.execute("PUBLISH", self._channel, data)
            await asyncio.sleep(REPEAT_INTERVAL_S)

    async def _until(self, phases: set[WavePhase], end: asyncio.Task[bool]) -> None:
        """Wait until the wave is in one of these phases or ``end`` is done, then cancel ``end``."""
        try:
            while self._wave.phase not in phases and not end.done():
                self._has_moved.clear()
                moved = asyncio.create_task(self._has_moved.wait())
                await asyncio.wait([moved, end], return_when=asyncio.FIRST_COMPLETED)
                moved.cancel()
        finally:
            end.cancel()

    def _on_message(self, data: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(data, type=WaveStarted)
        except msgspec.DecodeError as error:
            log.warning("wave_message_undecodable", error=str(error))
            return
        if self._is_serving and self._place is not None and message.generation == self._place.generation:
            self._core.tell(StartWave(message.wave))

    def _report_status(self) -> None:
        place = self._place
        if place is not None:
            group = self._engine.data_parallel_group
            self._report(
                GroupStatus(group, place.generation, place.rank, place.size, self._wave.wave, self._wave.phase)
            )


class NoGroup:
    """Replaces ``GroupMember`` for an engine that is not a rank."""

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self.has_left = asyncio.Event()

    async def enter(self) -> EngineConfig:
        return self._engine

    async def serve(self, ready: Ready) -> None:
        pass

    def record_wave(self, stats: SchedulerStats | None) -> None:
        pass

    async def leave(self, patience_s: float, immediately: asyncio.Event) -> None:
        pass

    async def close(self) -> None:
        pass


def _free_port() -> int:
    """Return a port that is free now. If another program binds it first, the ranks do not meet and start again."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
