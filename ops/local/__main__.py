"""``python -m penstock.ops.local PID MODEL OPTION …``: a private Redis and `worker start`, while process PID lives.

``LLM(model=…)`` runs it, because a client imports neither the worker nor this folder. The line "ready: URL" on standard
output says that the model is served. SIGTERM ends it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from types import FrameType

from ...shared.errors import ConfigurationError, EngineDeadError
from ...shared.process.command_line import print_if_read, run_reporting_errors
from ...shared.values.distribution import install_command

POLL_S = 0.1


def _leave(number: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _leave_after(parent_pid: int) -> None:
    """Send this process SIGTERM when its parent has ended, even by kill -9."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _serve_parent() -> int:
    if importlib.util.find_spec("psutil") is None:
        raise ConfigurationError(
            f"LLM(model=...) starts a worker, which a client installation lacks; {install_command('worker')}"
        )
    from .stack import LocalStack

    parent_pid, model, *options = sys.argv[1:]
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_after, args=(int(parent_pid),), daemon=True).start()
    with LocalStack(model, options) as stack:
        print_if_read(f"ready: {stack.url}")
        raise EngineDeadError(stack.await_failure())


if __name__ == "__main__":
    sys.exit(run_reporting_errors(_serve_parent))
