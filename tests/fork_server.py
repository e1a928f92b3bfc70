"""The fork server of a run of tests: it imports torch when the first engine is started, and its cores heed a gate.

A test that acts in the middle of something says how far requests may come meanwhile (``faults/gate.py``): then the
middle lasts for as long as the test needs, however fast the machine is. Nothing of it is in the engine: the two
methods are wrapped here, in a process that only tests start.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

GATE_VARIABLE = "PENSTOCK_TEST_GATE"
# While every request is held the core looks for messages, and at the gate, so often.
HELD_STEP_S = 0.01


class CoreGate:
    """What one core knows of its test's gate.

    Attributes:
        max_tokens: how many output tokens a request may have.
        max_ended: how many of the core's requests may have ended.
    """

    def __init__(self) -> None:
        self.max_tokens = self.max_ended = float("inf")
        self._seen: tuple[int, int] | None = None

    def look(self, scheduler: Any) -> None:
        """Read the gate if it has changed; requests are counted from then on."""
        path = os.environ.get(GATE_VARIABLE)
        if path is None:
            return
        try:
            with open(path) as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_mtime_ns) != self._seen:
                    self._seen = (status.st_ino, status.st_mtime_ns)
                    self.max_tokens, num_more = map(float, file.read().split())
                    self.max_ended = num_ended(scheduler) + num_more
        except FileNotFoundError:
            self.max_tokens = self.max_ended = float("inf")
            self._seen = None

    def holds(self, request: Any, num_ended: int) -> bool:
        return num_ended >= self.max_ended or request.num_output_tokens >= self.max_tokens


def num_ended(scheduler: Any) -> int:
    return scheduler._num_arrived - len(scheduler._requests)


def install_gate() -> None:
    """Make schedulers pass over requests that have come to the limit, and cores wait while they have no others."""
    from penstock.worker.engine.core import EngineCore
    from penstock.worker.engine.scheduling.scheduler import Scheduler

    schedule: Callable[[Any], Any] = Scheduler.schedule
    step: Callable[[Any], Any] = EngineCore.step

    gate = CoreGate()

    def gated_schedule(self: Any) -> Any:
        output, ended = schedule(self), num_ended(self)
        work = [(request, number) for request, number in output.work() if not gate.holds(request, ended)]
        output.requests, output.num_new_tokens = [request for request, _ in work], [number for _, number in work]
        return output

    def gated_step(self: Any) -> Any:
        gate.look(self.scheduler)
        requests, ended = self.scheduler._requests.values(), num_ended(self.scheduler)
        if requests and all(gate.holds(request, ended) for request in requests):
            time.sleep(HELD_STEP_S)
            return []
        return step(self)

    Scheduler.schedule, EngineCore.step = gated_schedule, gated_step


def main() -> None:
    listener = int(sys.argv[sys.argv.index("--listen-fd") + 1])
    if listener in select.select([listener, sys.stdin], [], [])[0]:
        from penstock.worker.engine import fork_server

        install_gate()
        fork_server.main()
    os._exit(0)


if __name__ == "__main__":
    main()
