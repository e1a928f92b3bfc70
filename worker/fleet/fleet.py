"""The reconciler: once a second it looks at the queue and at its agents, and makes of the one what the other asks for.

    look at agents ▶ bury the ended ▶ look at the queue ▶ target (scaling.py) ▶ place more, or drain the emptiest

To a reader of vLLM: ``members`` are the actors of ``CoreEngineActorManager``, their statuses its run references, and
``run`` is its ``wait_for_completion_or_failure``. Nothing waits for Ray to notice a death: requests of an engine that
is gone move by its lease, long before Ray has a host for another one.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import msgspec
import structlog

from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.restart_delay import STABLE_AFTER_S, restart_delay_s
from .demand import Demand, Seen
from .ground import Ground
from .member import Member, MemberPhase
from .scaling import Scaling, ScalingOptions
from .wire import AgentSpec

TICK_S = 1.0
# An agent that does not answer for so long, though it has room, is replaced; Ray brings a host back in 20 s.
REPLACE_AFTER_S = 60.0

log = structlog.get_logger()


class FleetStartError(PenstockError):
    """An engine ended, or could not begin, before any of the fleet had served."""

    code = "fleet_start_failed"


class Fleet:
    """Keeps as many workers in ``ground`` as ``scaling`` says.

    Args:
        spec: of the agents; each gets its number behind the worker's name.
        drain_timeout_s: how long a worker that leaves may finish what it runs.
        on_ready: called once, when the least number of engines serves.

    Attributes:
        members: of the fleet, those included that leave.
        target: how many it is to have.
    """

    def __init__(
        self,
        ground: Ground,
        demand: Demand,
        scaling: ScalingOptions,
        spec: AgentSpec,
        *,
        drain_timeout_s: float,
        on_ready: Callable[[], None],
        tick_s: float = TICK_S,
    ) -> None:
        self.members: list[Member] = []
        self.target = scaling.least
        self._ground = ground
        self._demand = demand
        self._options = scaling
        self._scaling = Scaling(scaling)
        self._spec = spec
        self._drain_timeout_s = drain_timeout_s
        self._on_ready: Callable[[], None] | None = on_ready
        self._tick_s = tick_s
        self._leaving: set[asyncio.Task[None]] = set()
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self._has_served = False
        self._num_deaths = 0
        self._not_before = 0.0
        self._waits_for_room = False

    async def run(self) -> None:
        """Serve until a signal, or ``stop``, and return when nothing of the fleet is left.

        The first signal drains, the second hands back at once, the third kills.

        Raises:
            FleetStartError: an engine could not start, before any had; the others have left.
        """
        async with self._signals():
            try:
                while not self._num_signals:
                    await self._tick()
                    await self._sleep(self._tick_s)
            finally:
                await self._close()

    def stop(self) -> None:
        """As a signal does."""
        self._num_signals += 1
        self._signalled.set()

    async def _tick(self) -> None:
        await asyncio.gather(*(member.look() for member in self.members if member.is_present))
        await self._bury()
        self._tell_ready()
        try:
            seen = await self._demand.look()
        except RedisUnavailableError as error:
            # Whoever serves waits for it as well; nobody knows what is to be done.
            log.warning("fleet_queue_unseen", error=str(error))
            return
        present = [member for member in self.members if member.is_present]
        load = self._demand.load(seen, [member.worker_prefix for member in self.members])
        target = self._scaling.target(time.monotonic(), load, len(present))
        if target != self.target:
            wait_s = seen.queue.estimated_wait_s
            log.info(
                "fleet_target",
                engines=target,
                before=self.target,
                num_waiting=load.num_waiting,
                estimated_wait_s=None if wait_s is None else round(wait_s, 1),
            )
            self.target = target
        if len(present) < target:
            await self._grow(target - len(present))
        elif len(present) > target:
            self._shrink(present, len(present) - target, seen)
        await self._tell_room()

    async def _grow(self, number: int) -> None:
        if time.monotonic() < self._not_before:
            return
        if self._ground.most is not None:
            number = min(number, self._ground.most - len(self.members))
        for _ in range(number):
            taken = {member.number for member in self.members}
            free = next(i for i in range(len(taken) + 1) if i not in taken)
            spec = msgspec.structs.replace(self._spec, worker_name=f"{self._spec.worker_name}-{free}")
            place = await self._ground.place(msgspec.msgpack.encode(spec))
            self.members.append(Member(free, spec.worker_name, place))

    def _shrink(self, present: Iterable[Member], number: int, seen: Seen) -> None:
        """Those leave that have cost least so far, and of those that serve the emptiest."""
        cheapest = sorted(
            present, key=lambda member: (member.phase, seen.num_held_by(member.worker_prefix), -member.number)
        )
        for member in cheapest[:number]:
            log.info("fleet_engine_leaves", worker=member.worker_name)
            self._let_leave(member)

    def _let_leave(self, member: Member) -> None:
        # From now on it counts as one that leaves, whenever its task begins.
        member.phase = MemberPhase.LEAVING
        task = asyncio.create_task(self._leave(member))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, member: Member) -> None:
        try:
            await member.leave(self._drain_timeout_s)
        except Exception as error:
            # The cluster's trouble. Without its driver it ends what is left of the fleet.
            log.error("fleet_engine_not_left", worker=member.worker_name, error=str(error), exc_info=True)
        else:
            log.info("fleet_engine_left", worker=member.worker_name)
        self.members.remove(member)

    async def _bury(self) -> None:
        """Give up who ended by itself or has been gone for long; the next tick places another one."""
        for member in self.members.copy():
            self._has_served = self._has_served or member.has_served
            cause = await self._cause_of_end(member)
            if cause is None:
                continue
            await member.give_up()
            self.members.remove(member)
            if not self._has_served:
                raise FleetStartError(cause)
            was_stable = member.has_served and time.monotonic() - member.serving_since > STABLE_AFTER_S
            self._num_deaths = 1 if was_stable else self._num_deaths + 1
            delay_s = restart_delay_s(self._num_deaths)
            self._not_before = time.monotonic() + delay_s
            log.error("fleet_engine_lost", worker=member.worker_name, cause=cause, restart_in_s=delay_s)

    async def _cause_of_end(self, member: Member) -> str | None:
        if member.phase is MemberPhase.ENDED:
            return member.cause_of_end
        since = member.unreachable_since
        if not member.is_present or since is None or time.monotonic() - since < REPLACE_AFTER_S:
            return None
        return None if await member.place.waits_for_room() else member.trouble

    def _tell_ready(self) -> None:
        num_serving = sum(member.phase is MemberPhase.SERVING for member in self.members)
        if self._on_ready is not None and num_serving >= self._options.least:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()

    async def _tell_room(self) -> None:
        """Say once that no host has room for an engine, and once that all have found it."""
        waiting = [member for member in self.members if member.phase is MemberPhase.PLACED]
        without = [member.worker_name for member in waiting if await member.place.waits_for_room()]
        if bool(without) != self._waits_for_room:
            self._waits_for_room = bool(without)
            if without:
                log.warning("fleet_waits_for_room", workers=without, ground=self._ground.name)
            else:
                log.info("fleet_has_room")

    async def _close(self) -> None:
        """Let all leave, each signal in a greater hurry than the one before."""
        for member in self.members:
            if member.phase is not MemberPhase.LEAVING:
                self._let_leave(member)
        urgent: list[asyncio.Task[None]] = []
        hurried = max(1, self._num_signals)
        while self._leaving:
            self._signalled.clear()
            if self._num_signals > hurried:
                hurried = self._num_signals
                urgent += [asyncio.create_task(_hasten(member, hurried)) for member in self.members]
            signalled = asyncio.create_task(self._signalled.wait())
            await asyncio.wait([*self._leaving, signalled], return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
        await asyncio.gather(*urgent)

    async def _sleep(self, seconds: float) -> None:
        """Until the next tick, or a signal."""
        if self._num_signals:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._signalled.wait()
        except TimeoutError:
            pass

    @asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """Heed SIGINT and SIGTERM; Ray has its own ways with them, and gets them back."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def _hasten(member: Member, num_signals: int) -> None:
    if num_signals > 2:
        await member.give_up()
    elif member.status is not None:
        await member.hurry(0.0)
