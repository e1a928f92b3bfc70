"""Scaling of a running supervisor: drains the engines above the requested number, starts the missing ones.

    slot 0: engine h-0        The slot of an engine determines its id, name and device. The last slots leave first.
    slot 1: engine h-1        A slot whose engine has left or was given up is filled first.
    slot 2: (left)

The number lasts as long as the supervisor. A restarted supervisor begins with the number of its command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from ...shared.process.waiting import wait_at_most
from .engine_process import EngineProcess
from .restart import Phase
from .supervised_engine import Engine

# As when a whole supervisor leaves.
HAND_BACK_TIMEOUT_S = 10.0

log = structlog.get_logger()


class Scaling:
    """Fills and empties slots. A newer number replaces one that is still being applied.

    Args:
        engines, running: engine and task of each slot; shared with the supervisor, which fills the first slots.
        make_engine: returns the engine of a slot.
        max_engines: limit of the number of engines.
        drain_patience_s: how long a leaving engine may finish its requests before it releases the rest.
        on_change: called after an engine was started or has left.
        refusal: why the number cannot change; empty if it can.
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
        """Number of engines that are not leaving."""
        return len(self._staying)

    @property
    def _staying(self) -> list[int]:
        return [slot for slot in range(len(self._running)) if not (slot in self._leaving or self._is_free(slot))]

    def scale(self, num_engines: int) -> None:
        """Change the number of engines. Returns immediately; logs the reason if the number is refused."""
        reason = self._refusal_reason(num_engines)
        if reason:
            log.warning("scale_refused", num_engines=num_engines, reason=reason)
            return
        staying = self._staying
        log.info("scaled", num_engines=num_engines, num_before=len(staying))
        for slot in staying[num_engines:]:
            self._leaving[slot] = asyncio.create_task(self._stop_slot(slot))
        for _ in range(num_engines - len(staying)):
            self._fill(self._free_slot())
        self._on_change()

    def stop(self) -> None:
        """Stop scaling, because the supervisor stops all engines."""
        self._is_over = True
        for task in self._leaving.values():
            task.cancel()

    def _refusal_reason(self, num_engines: int) -> str:
        if self._is_over:
            return "the worker is stopping"
        if self._refusal:
            return self._refusal
        if len(self._running) < len(self._engines):
            return "the worker is still starting"
        return "" if 1 <= num_engines <= self._max_engines else f"this worker can run 1 to {self._max_engines} engines"

    def _is_free(self, slot: int) -> bool:
        """Whether its engine has left or was given up. Its last processes may still be ending."""
        return self._running[slot].done() or self._engines[slot].policy.phase is Phase.GIVEN_UP

    def _free_slot(self) -> int:
        return next(filter(self._is_free, range(len(self._running))), len(self._running))

    def _fill(self, slot: int) -> None:
        engine = self._make_engine(slot)
        # It joins a running service, so a failed start is retried like a death.
        engine.is_restarted = True
        if slot == len(self._running):
            self._engines.append(engine)
            self._running.append(asyncio.create_task(engine.run()))
        else:
            task = asyncio.create_task(_run_after(self._running[slot], engine))
            self._engines[slot], self._running[slot] = engine, task

    async def _stop_slot(self, slot: int) -> None:
        """Let the engine of a slot finish its requests, then make it release them, then kill it."""
        engine, task = self._engines[slot], self._running[slot]
        steps = ((EngineProcess.drain, self._drain_patience_s), (EngineProcess.hand_back, HAND_BACK_TIMEOUT_S))
        try:
            for act, patience_s in (*steps, (EngineProcess.kill, None)):
                engine.leave(act)
                await wait_at_most(patience_s, asyncio.wait([task]))
                if task.done():
                    break
        finally:
            del self._leaving[slot]
            self._on_change()


async def _run_after(former: asyncio.Task[None], engine: Engine) -> None:
    """Run ``engine`` after ``former``, which has the same engine_id, has ended."""
    await asyncio.wait([former])
    await engine.run()
