"""The reconciler: once a second it reads the queue and the status of its agents, and adapts their number to the queue.

    poll agents ▶ remove dead ones ▶ read the queue ▶ target (scaling.py) ▶ place more, or drain the emptiest

For readers of vLLM: ``members`` are the actors of ``CoreEngineActorManager``, their statuses its run references, and
``run`` is its ``wait_for_completion_or_failure``. Recovery does not wait for Ray to notice a death: the requests of a
dead engine are reclaimed when its lease expires, long before Ray has a host for another engine.
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
from ...shared.process.children import STABLE_AFTER_S, restart_delay_s
from ...shared.process.waiting import wait_at_most
from .backend import AgentSpec, FleetBackend
from .demand import Demand, DemandSnapshot
from .member import Member, MemberPhase
from .scaling import Scaling, ScalingOptions

TICK_S = 1.0
# A placed agent that does not answer for this long is replaced. Ray restarts a host's agents within 20 s, and waits
# 60 s for a process before it starts another. On a busy host an agent, of niceness 15, needs a minute to start.
REPLACE_AFTER_S = 180.0

log = structlog.get_logger()


class FleetStartError(PenstockError):
    """An engine ended, or could not start, before any engine of the fleet had served."""

    code = "fleet_start_failed"


class Fleet:
    """Keeps as many workers in ``backend`` as ``scaling`` requires.

    Args:
        spec: specification of the agents; each agent's number is appended to the worker's name.
        drain_timeout_s: how long a draining worker may finish its requests.
        on_ready: called once, when the least number of engines serves.

    Attributes:
        members: members of the fleet, including those that drain.
        target: number of engines that the fleet should have.
    """

    def __init__(
        self,
        backend: FleetBackend,
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
        self._backend = backend
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
        self._lacks_capacity = False

    async def run(self) -> None:
        """Serve until a signal or ``stop``, and return when all engines of the fleet have exited.

        The first signal drains, the second releases requests immediately, the third kills.

        Raises:
            FleetStartError: an engine could not start before any had served; the other engines have exited.
        """
        async with self._signals():
            try:
                while not self._num_signals:
                    await self._tick()
                    await self._sleep(self._tick_s)
            finally:
                await self._close()

    def stop(self) -> None:
        """Stop as a signal does."""
        self._num_signals += 1
        self._signalled.set()

    async def _tick(self) -> None:
        await asyncio.gather(*(member.poll() for member in self.members if member.is_present))
        await self._remove_lost()
        self._report_ready()
        try:
            snapshot = await self._demand.read()
        except RedisUnavailableError as error:
            # Keep the fleet as it is: engines wait for Redis too, and the demand is unknown.
            log.warning("fleet_queue_unreadable", error=str(error))
            return
        present = [member for member in self.members if member.is_present]
        load = self._demand.load(snapshot, [member.worker_prefix for member in self.members])
        target = self._scaling.target(time.monotonic(), load, len(present))
        if target != self.target:
            wait_s = snapshot.queue.estimated_wait_s
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
            self._shrink(present, len(present) - target, snapshot)
        await self._log_capacity()

    async def _grow(self, number: int) -> None:
        if time.monotonic() < self._not_before:
            return
        if self._backend.most is not None:
            number = min(number, self._backend.most - len(self.members))
        for _ in range(number):
            numbers = {member.number for member in self.members}
            free = next(i for i in range(len(numbers) + 1) if i not in numbers)
            spec = msgspec.structs.replace(self._spec, worker_name=f"{self._spec.worker_name}-{free}")
            place = await self._backend.place(msgspec.msgpack.encode(spec))
            self.members.append(Member(free, spec.worker_name, place))

    def _shrink(self, present: Iterable[Member], number: int, snapshot: DemandSnapshot) -> None:
        """Drain ``number`` members: those in the earliest phase first, then the engines with the fewest requests."""
        cheapest = sorted(
            present, key=lambda member: (member.phase, snapshot.num_held_by(member.worker_prefix), -member.number)
        )
        for member in cheapest[:number]:
            log.info("fleet_engine_leaves", worker=member.worker_name)
            self._let_leave(member)

    def _let_leave(self, member: Member) -> None:
        # Set here and not in the task, so that the member counts as leaving immediately.
        member.phase = MemberPhase.LEAVING
        task = asyncio.create_task(self._drain_member(member))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _drain_member(self, member: Member) -> None:
        try:
            await member.leave(self._drain_timeout_s)
        except Exception as error:
            # An error of the cluster, which ends the rest of the fleet when this driver exits.
            log.error("fleet_engine_not_left", worker=member.worker_name, error=str(error), exc_info=True)
        else:
            log.info("fleet_engine_left", worker=member.worker_name)
        self.members.remove(member)

    async def _remove_lost(self) -> None:
        """Remove members that ended or have not answered for long; the next tick places others."""
        for member in self.members.copy():
            self._has_served = self._has_served or member.has_served
            cause = await self._cause_of_end(member)
            if cause is None:
                continue
            await member.give_up()
            self.members.remove(member)
            if not self._has_served:
                raise FleetStartError(cause)
            is_stable = member.has_served and time.monotonic() - member.serving_since > STABLE_AFTER_S
            self._num_deaths = 1 if is_stable else self._num_deaths + 1
            delay_s = restart_delay_s(self._num_deaths)
            self._not_before = time.monotonic() + delay_s
            log.error("fleet_engine_lost", worker=member.worker_name, cause=cause, restart_in_s=delay_s)

    async def _cause_of_end(self, member: Member) -> str | None:
        if member.phase is MemberPhase.ENDED:
            return member.cause_of_end
        since = member.unreachable_since
        if not member.is_present or since is None or time.monotonic() - since < REPLACE_AFTER_S:
            return None
        return None if await member.place.is_pending() else member.error

    def _report_ready(self) -> None:
        num_serving = sum(member.phase is MemberPhase.SERVING for member in self.members)
        if self._on_ready is not None and num_serving >= self._options.least:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()

    async def _log_capacity(self) -> None:
        """Log once that no host has capacity for an engine, and once that all engines have a host."""
        placed = [member for member in self.members if member.phase is MemberPhase.PLACED]
        pending = [member.worker_name for member in placed if await member.place.is_pending()]
        if bool(pending) != self._lacks_capacity:
            self._lacks_capacity = bool(pending)
            if pending:
                log.warning("fleet_capacity_missing", workers=pending, backend=self._backend.name)
            else:
                log.info("fleet_capacity_available")

    async def _close(self) -> None:
        """Drain all members; each further signal escalates the stop."""
        for member in self.members:
            if member.phase is not MemberPhase.LEAVING:
                self._let_leave(member)
        escalations: list[asyncio.Task[None]] = []
        num_handled = max(1, self._num_signals)
        while self._leaving:
            self._signalled.clear()
            if self._num_signals > num_handled:
                num_handled = self._num_signals
                escalations += [asyncio.create_task(_escalate(member, num_handled)) for member in self.members]
            signalled = asyncio.create_task(self._signalled.wait())
            await asyncio.wait([*self._leaving, signalled], return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
        await asyncio.gather(*escalations)

    async def _sleep(self, seconds: float) -> None:
        """Wait until the next tick or a signal."""
        if self._num_signals:
            return
        await wait_at_most(seconds, self._signalled.wait())

    @asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        """Handle SIGINT and SIGTERM, and restore Ray's handlers afterwards."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        former_handlers = [signal.getsignal(number) for number in numbers]
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number, handler in zip(numbers, former_handlers, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def _escalate(member: Member, num_signals: int) -> None:
    if num_signals > 2:
        await member.give_up()
    elif member.status is not None:
        await member.drain(0.0)
