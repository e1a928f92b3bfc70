"""Faults at each step of a swap: a process dies while a model goes to sleep, sleeps, wakes, loads, or has just woken.

Steps of tiny models take milliseconds. So the core of the model is stopped before, and continues after the fault.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import psutil

from ....shared.deployment.records import EngineHeartbeat
from ....shared.messages.devices import DeviceModel, DeviceRecord, ModelPhase
from ....shared.swap.views import SleepLevel
from ...local.stack import LocalStack
from .redis_trouble import Action
from .several_models import SwapWatch

# Time for a step to begin. Shorter than the time after which a stopped core counts as stalled.
_STEP_PATIENCE_S = 5.0
# A swap may wait longer than that for its debt.
_MAX_TRIES = 4
_LOAD_POLL_S = 0.02
# A load takes about this long.
_LOAD_S = 1.0
_ROLES = ("core", "worker", "supervisor")
# Actions of Redis that happen in a swap, too.
_REDIS_ACTIONS = ("restart redis", "stop redis", "lose data")
IN_A_SWAP = " in a swap"

Kill = Callable[[EngineHeartbeat, str], Awaitable[bool]]


class SwapTrouble:
    """Actions on the swaps of devices.

    Args:
        kill: kills the process of an engine with a role; returns whether it was alive.
        read_beats: reads the heartbeats of all engines.
        redis_actions: actions on Redis, by name, with their weights.
    """

    def __init__(
        self,
        stack: LocalStack,
        watch: SwapWatch,
        random: Random,
        kill: Kill,
        read_beats: Callable[[], Awaitable[list[EngineHeartbeat]]],
        redis_actions: dict[str, tuple[int, Action]],
    ) -> None:
        self._stack = stack
        self._watch = watch
        self._random = random
        self._kill = kill
        self._read_beats = read_beats
        self.actions: dict[str, tuple[int, Action]] = {
            "kill a process that loads": (6, self._kill_loading),
            "deny memory": (4, self._deny_memory),
        }
        for role in _ROLES:
            self.actions |= {
                f"kill {role} going to sleep": (2, lambda role=role: self._kill_going_to_sleep(role)),
                f"kill {role} asleep": (2, lambda role=role: self._kill_asleep(role)),
                f"kill {role} waking": (2, lambda role=role: self._kill_waking(role)),
                f"kill {role} just awake": (2, lambda role=role: self._kill_just_awake(role)),
            }
        for name in _REDIS_ACTIONS:
            if name in redis_actions:
                self.actions[name + IN_A_SWAP] = (2, lambda act=redis_actions[name][1]: self._in_a_swap(act))

    async def _kill_going_to_sleep(self, role: str) -> bool:
        return await self._kill_in_step(role, ModelPhase.AWAKE, ModelPhase.FALLING_ASLEEP)

    async def _kill_waking(self, role: str) -> bool:
        return await self._kill_in_step(role, ModelPhase.ASLEEP, ModelPhase.WAKING)

    async def _kill_in_step(self, role: str, before: ModelPhase, phase: ModelPhase) -> bool:
        for _ in range(_MAX_TRIES):
            if await self._kill_in_phase(role, before, phase):
                return True
        return False

    async def _kill_in_phase(self, role: str, before: ModelPhase, phase: ModelPhase) -> bool:
        """Stop the core of a model, wait until a swap waits for it, and kill a process."""
        match = await self._watch.wait_for(lambda _, model: model.phase == before, _STEP_PATIENCE_S)
        beat = await self._beat_of(match)
        if beat is None or not beat.core_pid:
            return False
        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(beat.core_pid)
            core.suspend()
            try:
                at_step = await self._watch.wait_for(
                    lambda _, model: model.engine_id == beat.engine_id and model.phase == phase, _STEP_PATIENCE_S
                )
                return at_step is not None and await self._kill(beat, f"{role}_pid")
            finally:
                core.resume()
        return False

    async def _kill_asleep(self, role: str) -> bool:
        match = await self._watch.wait_for(lambda _, model: model.phase == ModelPhase.ASLEEP, _STEP_PATIENCE_S)
        beat = await self._beat_of(match)
        return beat is not None and await self._kill(beat, f"{role}_pid")

    async def _kill_just_awake(self, role: str) -> bool:
        former = {record.device_id: record.last_swap for record in self._watch.records}

        def has_just_woken(record: DeviceRecord, model: DeviceModel) -> bool:
            swap = record.last_swap
            return swap is not None and swap != former.get(record.device_id) and swap.entered == model.name

        beat = await self._beat_of(await self._watch.wait_for(has_just_woken, _STEP_PATIENCE_S))
        return beat is not None and await self._kill(beat, f"{role}_pid")

    async def _kill_loading(self) -> bool:
        """Kill a process of a worker a short time after it was started."""
        former = set(self._processes())
        for _ in range(int(_STEP_PATIENCE_S / _LOAD_POLL_S)):
            if new := [process for pid, process in self._processes().items() if pid not in former]:
                await asyncio.sleep(self._random.uniform(0, _LOAD_S))
                with suppress(psutil.NoSuchProcess):
                    self._random.choice(new).kill()
                    return True
                return False
            await asyncio.sleep(_LOAD_POLL_S)
        return False

    async def _deny_memory(self) -> bool:
        """Limit the address space of a sleeping core to its present size, until the end of its next attempt to wake."""
        match = await self._watch.wait_for(
            lambda _, model: model.phase == ModelPhase.ASLEEP and model.level != SleepLevel.DISK, _STEP_PATIENCE_S
        )
        beat = await self._beat_of(match)
        if match is None or beat is None or not beat.core_pid:
            return False

        def has_tried(_: DeviceRecord, model: DeviceModel) -> bool:
            is_another = model.wake_failures != match[1].wake_failures or model.phase != ModelPhase.ASLEEP
            return model.engine_id == beat.engine_id and is_another

        def has_ended(_: DeviceRecord, model: DeviceModel) -> bool:
            return model.engine_id == beat.engine_id and model.phase != ModelPhase.WAKING

        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(beat.core_pid)
            limits = core.rlimit(resource.RLIMIT_AS)
            core.rlimit(resource.RLIMIT_AS, (core.memory_info().vms, limits[1]))
            try:
                has_happened = await self._watch.wait_for(has_tried, 2 * _STEP_PATIENCE_S) is not None
                await self._watch.wait_for(has_ended, _STEP_PATIENCE_S)
                return has_happened
            finally:
                core.rlimit(resource.RLIMIT_AS, limits)
        return False

    async def _in_a_swap(self, action: Action) -> bool:
        phases = (ModelPhase.WAKING, ModelPhase.FALLING_ASLEEP)
        match = await self._watch.wait_for(lambda _, model: model.phase in phases, _STEP_PATIENCE_S)
        return match is not None and await action()

    async def _beat_of(self, match: tuple[DeviceRecord, DeviceModel] | None) -> EngineHeartbeat | None:
        """Return the heartbeat of the engine of a model; None if its process has not written one."""
        if match is None:
            return None
        beats = await self._read_beats()
        return next((beat for beat in beats if beat.engine_id == match[1].engine_id), None)

    def _processes(self) -> dict[int, psutil.Process]:
        """Return the processes below all supervisors."""
        below: dict[int, psutil.Process] = {}
        for worker in self._stack.workers:
            if worker.is_running:
                with suppress(psutil.NoSuchProcess):
                    below |= {child.pid: child for child in psutil.Process(worker.pid).children(recursive=True)}
        return below
