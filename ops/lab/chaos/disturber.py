"""Kills, stops and drains the processes of a ``LocalStack`` at random, in an order that its seed fixes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from random import Random

import psutil

from ....shared.broker import Broker
from ....shared.deployment.presence import read_heartbeats
from ....shared.deployment.records import EngineHeartbeat
from ....shared.errors import ConfigurationError, RedisUnavailableError
from ....shared.keys import Keys
from ....shared.messages.supervision import EngineState
from ....shared.partitions import Layouts
from ....shared.process.log import get_logger
from ....shared.shards import make_commands
from ...local.stack import LocalStack
from ...local.worker import LocalWorker
from ..clusters.sentinel_trio import SentinelTrio
from .pace import Pace
from .recovery_clock import RecoveryClock
from .redis_trouble import Action, RedisTrouble
from .several_models import SwapWatch
from .swap_trouble import IN_A_SWAP, SwapTrouble

STOP_S = (0.5, 8.0)
# After so many actions one that was requested and has not happened is chosen every other time.
NUM_OTHERS = 3
# A run whose kills or requested actions do not come goes on for at most so many times the requested number of events.
MAX_EXCESS = 4
# A role in addition to those of a heartbeat.
_RANK = "rank"
# A worker started while Redis is unreachable exits immediately. Time for which it is started again.
START_PATIENCE_S = 900.0
START_PAUSE_S = 0.2

log = get_logger(__name__)


class Disturber:
    """Something happens at the ``pace`` until ``run`` is cancelled; ``settle`` then undoes the rest.

    A supervisor that ended is started again, as a service manager would.

    Args:
        trio, loses_data: as of ``RedisTrouble``.
        has_ranks: engines have several ranks, of which those above 0 are disturbed, too.
        watch: watches devices with several models, whose swaps are disturbed, too.
    """

    def __init__(
        self,
        stack: LocalStack,
        seed: int,
        pace: Pace,
        clock: RecoveryClock,
        trio: SentinelTrio | None = None,
        *,
        loses_data: bool = False,
        has_ranks: bool = False,
        watch: SwapWatch | None = None,
    ) -> None:
        self._stack = stack
        self._random = Random(seed)
        self._pace = pace
        self._watch = watch
        self._clock = clock
        self._background: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._reviving: set[LocalWorker] = set()
        self.events: Counter[str] = Counter()
        self._redis = RedisTrouble(stack, self._random, trio, loses_data=loses_data)
        self._actions: dict[str, tuple[int, Action]] = {
            "kill core": (4, lambda: self._kill("core_pid")),
            "kill worker": (2, lambda: self._kill("worker_pid")),
            "kill supervisor": (1, lambda: self._kill("supervisor_pid")),
            "stop core": (1, lambda: self._pause("core_pid")),
            "stop worker": (2, lambda: self._pause("worker_pid")),
            "stop supervisor": (1, lambda: self._pause("supervisor_pid")),
            "stop host": (2, self._pause_host),
            "drain": (1, self._drain),
            **self._redis.actions,
        }
        if has_ranks:
            self._actions["kill rank"] = (4, lambda: self._kill(_RANK))
            self._actions["stop rank"] = (1, lambda: self._pause(_RANK))
        if watch is not None:
            trouble = SwapTrouble(stack, watch, self._random, self._kill_process, self._read_beats, self._redis.actions)
            self._actions |= trouble.actions

    @property
    def num_kills(self) -> int:
        """Number of killed processes that had work."""
        return sum(
            count for name, count in self.events.items() if name in self._redis.kills or name.startswith("kill ")
        )

    @property
    def missing(self) -> list[str]:
        """Requested actions that have not happened."""
        happened = [name.removesuffix(IN_A_SWAP) for name, count in self.events.items() if count]
        return sorted(set(self._redis.asked_for).difference(happened))

    def has_shown(self, min_events: int) -> bool:
        """Return whether ``min_events`` events have happened, with a kill and each requested action among them.

        If these do not come, it is true after ``MAX_EXCESS`` times as many events.
        """
        num = self.events.total()
        is_complete = self.num_kills > 0 and not self.missing
        return num >= min_events and (is_complete or num >= MAX_EXCESS * min_events)

    async def run(self) -> None:
        """Inject faults until cancelled. Actions in progress are completed."""
        self._commands = make_commands(self._stack.url, self._stack.shards, Keys())
        try:
            while True:
                await self._pace.wait(self._random)
                name = self._choose()
                log.info("chaos_action", action=name)
                try:
                    has_happened = await _to_its_end(self._actions[name][1]())
                except RedisUnavailableError as error:
                    # No target was found: a failover is in progress.
                    log.info("chaos_action_dropped", action=name, reason=str(error))
                    continue
                finally:
                    self._record_fault()
                self.events[name] += has_happened
        finally:
            await self._commands.close()

    def _choose(self) -> str:
        # Otherwise a short run shows nothing if chance, or a target that was away, leaves out what options request.
        missing = self.missing
        if missing and self.events.total() >= NUM_OTHERS and self._random.random() < 0.5:
            return self._random.choice(missing)
        (name,) = self._random.choices(list(self._actions), [weight for weight, _ in self._actions.values()])
        return name

    async def settle(self) -> None:
        """Wait until all paused processes continue and every worker serves again.

        Raises:
            ConfigurationError: a worker could not be started again.
        """
        await self._redis.settle()
        while self._background:
            await asyncio.wait(self._background)
        for failure in self._failures:
            raise failure
        for worker in self._stack.workers:
            if not worker.is_running:
                await self._revive(worker)

    async def _victim(self) -> EngineHeartbeat | None:
        states = (EngineState.READY, EngineState.BUSY, EngineState.DRAINING)
        serving = [beat for beat in await self._read_beats() if beat.state in states]
        return self._random.choice(serving) if serving else None

    async def _read_beats(self) -> list[EngineHeartbeat]:
        # The last beat of one that was killed outlives it, and may still be there when its worker was started again.
        beats = await read_heartbeats(self._commands.execute, Keys())
        return [beat for beat in beats if self._worker_of(beat) is not None]

    async def _kill(self, role: str) -> bool:
        victim = await self._victim()
        return victim is not None and await self._kill_process(victim, role)

    async def _kill_process(self, victim: EngineHeartbeat, role: str) -> bool:
        worker = self._worker_of(victim)
        claimed: list[str] = []
        for number in range((await Layouts(self._commands, Keys()).read(victim.model)).num_known):
            broker = Broker(self._commands, Keys().model(victim.model, number), number)
            claimed += [request_id for request_id, _ in await broker.claims(victim.engine_id)]
        pid = self._pid_of(victim, role)
        if not pid:
            return False  # a sleeping engine may have no core
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            return False
        self._clock.died(claimed)
        if role == "supervisor_pid" and worker is not None:
            self._revive_later(worker)
        return True

    async def _pause(self, role: str) -> bool:
        victim = await self._victim()
        if victim is None:
            return False
        try:
            process = psutil.Process(self._pid_of(victim, role))
        except psutil.NoSuchProcess:
            return False
        self._spawn_task(_stop_for([process], self._random.uniform(*STOP_S)))
        return True

    async def _pause_host(self) -> bool:
        """Pause all processes of a `worker start`, as on a paused host, so that none of them can notice.

        If that lasts, other engines resume their requests. When the processes continue, they write as before.
        """
        victim = await self._victim()
        if victim is None:
            return False
        try:
            # Fork servers shared by several hosts are the parents of processes of other hosts.
            roles = ("supervisor_pid", "worker_pid", "core_pid")
            heads = [psutil.Process(self._pid_of(victim, role)) for role in roles]
            below = [process for head in heads for process in head.children(recursive=True)]
            processes = list({process.pid: process for process in (*heads, *below)}.values())
        except psutil.NoSuchProcess:
            return False
        self._spawn_task(_stop_for(processes, self._random.uniform(*STOP_S)))
        return True

    async def _drain(self) -> bool:
        worker = self._random.choice(self._stack.workers)
        if not worker.is_running or worker in self._reviving:
            return False
        os.kill(worker.pid, signal.SIGTERM)
        self._revive_later(worker)
        return True

    def _revive_later(self, worker: LocalWorker) -> None:
        """Start a worker again once its supervisor has ended; once, however often it is killed meanwhile."""
        if worker not in self._reviving:
            self._reviving.add(worker)
            self._spawn_task(self._revive(worker))

    async def _revive(self, worker: LocalWorker) -> None:
        try:
            await self._start_again(worker)
        finally:
            self._reviving.discard(worker)

    async def _start_again(self, worker: LocalWorker) -> None:
        await asyncio.to_thread(worker.await_end)
        until = time.monotonic() + START_PATIENCE_S
        while True:
            await asyncio.to_thread(worker.spawn)
            try:
                await asyncio.to_thread(worker.await_ready)
                return
            except ConfigurationError as error:  # it was killed while it started, or Redis is away
                log.info("worker_not_started", error=str(error)[-200:])
                await asyncio.to_thread(worker.await_end)
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(START_PAUSE_S)

    def _pid_of(self, beat: EngineHeartbeat, role: str) -> int:
        """Return the id of the process with a role; 0 if the engine has none."""
        if role != _RANK:
            return getattr(beat, role)
        ranks = beat.setup.ranks if beat.setup is not None else None
        return self._random.choice(ranks.local_pids[1:]) if ranks is not None else 0

    def _worker_of(self, beat: EngineHeartbeat) -> LocalWorker | None:
        return next((worker for worker in self._stack.workers if worker.pid == beat.supervisor_pid), None)

    def _spawn_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _record_fault(self) -> None:
        if self._watch is not None:
            self._watch.fault()

    def _done(self, task: asyncio.Future[None]) -> None:
        self._record_fault()
        self._background.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._failures.append(failure)


async def _to_its_end(action: Awaitable[bool]) -> bool:
    """Await an action that must not be left half done: Redis would stay full, or dead."""
    doing = asyncio.ensure_future(action)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await doing
        raise


async def _stop_for(processes: list[psutil.Process], seconds: float) -> None:
    try:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()
