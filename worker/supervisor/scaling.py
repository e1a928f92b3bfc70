"""How many engines a supervisor has, while it runs: those beyond the wanted number drain, those that lack are started.

    slot 0: engine h-0        An engine's slot gives it its id, its name and its device. Those that leave are the last
    slot 1: engine h-1        ones; a slot whose engine is gone, or was given up, is filled first when more are wanted.
    slot 2: (left)

The number lives as long as the supervisor: one that is started again begins with what its command line says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from .engine_process import EngineProcess
from .restart import Phase
from .supervised_engine import Engine

# The same as when a whole supervisor leaves.
HAND_BACK_TIMEOUT_S = 10.0

log = structlog.get_logger()


class Scaling:
    """Fills and empties slots, one change of the number after the other; a newer wish overtakes one under way.

    Args:
        engines, running: by slot, and the task of each; shared with the supervisor, which has filled the first.
        make_engine: makes the engine of a slot.
        max_engines: that there is room for.
        drain_patience_s: how long an engine that leaves may finish what runs, before it hands the rest back.
        on_change: called when an engine was started or is gone.
        refusal: why their number stays; empty if it may change.
    """

    def __init__(
        self,
        engines: list[Engine],
        running: list[asyncio.Task[None]],
        make_engine: Callable[[int], Engine],
        max_engines: int,
        drain_patience_s: float,
        on_change: Callable[[], None],
        refusal: str = "",
    ) -> None:
        self._engines = engines
        self._running = running
        self._make_engine = make_engine
        self._max_engines = max_engines
        self._drain_patience_s = drain_patience_s
        self._on_change = on_change
        self._refusal = refusal
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._is_over = False

    @property
    def num_staying(self) -> int:
        """Engines that are to stay."""
        return len(self._staying)

    @property
    def _staying(self) -> list[int]:
        return [slot for slot in range(len(self._running)) if not (slot in self._leaving or self._is_free(slot))]

    def scale(self, num_engines: int) -> None:
        """Have so many engines from now on; says why not in the log, where that cannot be. Returns at once."""
        reason = self._obstacle(num_engines)
        if reason:
            log.warning("scale_refused", num_engines=num_engines, reason=reason)
            return
        staying = self._staying
        log.info("scaled", num_engines=num_engines, num_before=len(staying))
        for slot in staying[num_engines:]:
            self._leaving[slot] = asyncio.create_task(self._leave(slot))
        for _ in range(num_engines - len(staying)):
            self._fill(self._free_slot())
        self._on_change()

    def stop(self) -> None:
        """Change nothing more: all leave, which the supervisor sees to."""
        self._is_over = True
        for task in self._leaving.values():
            task.cancel()

    def _obstacle(self, num_engines: int) -> str:
        if self._is_over:
            return "the worker leaves"
        if self._refusal:
            return self._refusal
        if len(self._running) < len(self._engines):
            return "the worker has not begun yet"
        return "" if 1 <= num_engines <= self._max_engines else f"there is room for 1 to {self._max_engines}"

    def _is_free(self, slot: int) -> bool:
        """Whether its engine is gone, or was given up, though what is left of it may still be ending."""
        return self._running[slot].done() or self._engines[slot].policy.phase is Phase.GIVEN_UP

    def _free_slot(self) -> int:
        return next(filter(self._is_free, range(len(self._running))), len(self._running))

    def _fill(self, slot: int) -> None:
        engine = self._make_engine(slot)
        # It has a service to join: should its start fail, it is tried again as one that died.
        engine.is_restarted = True
        if slot == len(self._running):
            self._engines.append(engine)
            self._running.append(asyncio.create_task(engine.run()))
        else:
            task = asyncio.create_task(_run_after(self._running[slot], engine))
            self._engines[slot], self._running[slot] = engine, task

    async def _leave(self, slot: int) -> None:
        """Let the engine of a slot finish what runs, then hand it back, then be killed."""
        engine, task = self._engines[slot], self._running[slot]
        steps = ((EngineProcess.drain, self._drain_patience_s), (EngineProcess.hand_back, HAND_BACK_TIMEOUT_S))
        try:
            for act, patience_s in (*steps, (EngineProcess.kill, None)):
                engine.leave(act)
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await asyncio.wait([task])
                if task.done():
                    break
        finally:
            del self._leaving[slot]
            self._on_change()


async def _run_after(former: asyncio.Task[None], engine: Engine) -> None:
    """It has the name of the one before it, of which nothing may be left."""
    await asyncio.wait([former])
    await engine.run()
