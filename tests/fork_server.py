"""The fork servers of a run of tests: they import when the first engine is started, and its cores heed a gate.

A test that acts in the middle of something says how far requests may come meanwhile (``faults/gate.py``): then the
middle lasts for as long as the test needs, however fast the machine is. Nothing of it is in the engine: its methods
are wrapped here, in a process that only tests start.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GATE_VARIABLE = "PENSTOCK_TEST_GATE"
# While every request is held the core looks for messages, and at the gate, so often.
HELD_STEP_S = 0.01


class CoreGate:
    """A core's view of its test's gate.

    Attributes:
        max_tokens: how many output tokens a request may have.
        max_ended: how many of the core's requests may have ended.
        keeps_flights: once every stage has a batch in flight none of them may land.
        num_ended: how many of them had ended at the core's last look.
    """

    def __init__(self) -> None:
        self.max_tokens = self.max_ended = float("inf")
        self.keeps_flights = False
        self.num_ended = 0
        self._seen: tuple[int, int] | None = None

    def look(self, scheduler: Any) -> None:
        """Read the gate if it has changed; requests are counted from then on."""
        self.num_ended = num_ended(scheduler)
        path = os.environ.get(GATE_VARIABLE)
        if path is None:
            return
        try:
            with open(path) as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_mtime_ns) != self._seen:
                    self._seen = (status.st_ino, status.st_mtime_ns)
                    self.max_tokens, num_more, keeps_flights = map(float, file.read().split())
                    self.max_ended = self.num_ended + num_more
                    self.keeps_flights = bool(keeps_flights)
        except FileNotFoundError:
            self.max_tokens = self.max_ended = float("inf")
            self.keeps_flights = False
            self._seen = None

    def holds(self, request: Any) -> bool:
        return self.num_ended >= self.max_ended or request.num_output_tokens >= self.max_tokens

    def stops(self, core: Any) -> bool:
        """Return whether ``core`` makes no step: no request may advance, or the batches in flight stay there."""
        stages = getattr(core, "_stages", ())
        if self.keeps_flights and stages and stages.is_full:
            Path(f"{os.environ[GATE_VARIABLE]}.flying-{os.getpid()}").touch()
            return True
        requests = core.scheduler._requests.values()
        return bool(requests) and not stages and all(map(self.holds, requests))


def num_ended(scheduler: Any) -> int:
    return scheduler._num_arrived - len(scheduler._requests)


def gated_methods(gate: CoreGate) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return, by class and name, methods that make schedulers skip requests at the limit, and cores wait without
    others.
    """
    from penstock.worker.engine.core.engine_core import EngineCore
    from penstock.worker.engine.core.in_flight import PipelinedCore
    from penstock.worker.engine.scheduling.batches import StagedBatches
    from penstock.worker.engine.scheduling.scheduler import Scheduler

    schedule: Callable[[Any], Any] = Scheduler.schedule
    free: Callable[..., Any] = StagedBatches.free

    def gated_schedule(self: Any) -> Any:
        # No request may wait for a turn, or for the beginning of a prompt, of those that are admitted for nothing.
        waiting = [request for request in self._waiting if gate.holds(request)]
        for request in waiting:
            self._waiting.remove(request)
        output = schedule(self)
        for request in waiting:
            self._waiting.add(request)
        work = [(request, number) for request, number in output.work() if not gate.holds(request)]
        output.requests, output.num_new_tokens = [request for request, _ in work], [number for _, number in work]
        return output

    def gated_free(self: Any, running: Any, room: int) -> Any:
        # A batch has room for its share alone: those that are held must not take it.
        return free(self, (request for request in running if not gate.holds(request)), room)

    def gated(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def gated_step(self: Any) -> Any:
            gate.look(self.scheduler)
            if gate.stops(self):
                time.sleep(HELD_STEP_S)
                return []
            return step(self)

        return gated_step

    return [
        (Scheduler, "schedule", gated_schedule),
        (StagedBatches, "free", gated_free),
        (EngineCore, "step", gated(EngineCore.step)),
        (PipelinedCore, "step_with_batch_queue", gated(PipelinedCore.step_with_batch_queue)),
    ]


def install_gate() -> None:
    """Have the engines of this process and its children heed the gate."""
    for kind, name, method in gated_methods(CoreGate()):
        setattr(kind, name, method)


def main() -> None:
    kind, listener = sys.argv.pop(1), int(sys.argv[sys.argv.index("--listen-fd") + 1])
    if listener in select.select([listener, sys.stdin], [], [])[0]:
        if kind == "workers":
            from penstock.worker.serving import fork_server as workers

            workers.main()
        from penstock.worker.engine import fork_server

        install_gate()
        fork_server.main()
    os._exit(0)


if __name__ == "__main__":
    main()
