"""Runs in vLLM's interpreter: ``-m MODULE …`` as Python does, with a core that waits at the gate of the tests.

A core holds all its requests once it has made as many tokens as the gate says, and chokes on a poisoned one; nothing of
that is in the adapter.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

HELD_STEP_S = 0.002
# A step with a request that has this raises, as one does on which a kernel chokes.
POISON = {3: 0.125}


class CoreGate:
    """A core's view of the gate; it counts tokens from the last change of the gate on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._max_tokens = float("inf")

    def holds(self, num_tokens: int) -> bool:
        try:
            with open(self._path) as file:
                status = os.fstat(file.fileno())
                if (status.st_ino, status.st_mtime_ns) != self._seen:
                    self._seen = (status.st_ino, status.st_mtime_ns)
                    self._max_tokens = num_tokens + float(file.read().split()[0])
        except FileNotFoundError:
            self._seen = None
            return False
        return num_tokens >= self._max_tokens


def install_gate(path: str) -> None:
    """Make cores look at the file before each step."""
    from penstock.worker.other_engines.vllm.core import VllmCore

    step, gate = VllmCore.step_fn, CoreGate(path)

    def gated_step(self: Any) -> Any:
        if any(running.request.params.logit_bias == POISON for running in self._running.values()):
            raise RuntimeError("the batch has a poisoned request")
        if self.num_unfinished_requests and gate.holds(self.stats().num_generation_tokens):
            time.sleep(HELD_STEP_S)
            return []
        return step(self)

    VllmCore.step_fn = gated_step


if __name__ == "__main__":
    assert sys.argv[1] == "-m", sys.argv
    # The folder of this file holds modules of the tests, which this program does not use.
    sys.path[0] = ""
    if "PENSTOCK_TEST_GATE" in os.environ:
        install_gate(os.environ["PENSTOCK_TEST_GATE"])
    del sys.argv[:2]
    runpy.run_module(sys.orig_argv[sys.orig_argv.index("-m") + 1], run_name="__main__", alter_sys=True)
