"""``python -m penstock.worker.cli.held GRACE_S``: a ``worker start`` that leaves when its standard input ends.

Somebody holds the other end: when that process dies, however it dies, the worker finishes what runs for ``GRACE_S``
seconds, hands back the rest, and is gone. Its options come from the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from . import main

# The supervisor hands back within ten seconds and then kills; beyond that it hangs itself.
_HAND_BACK_S = 12.0
# Two signals that wait together would be delivered as one.
_APART_S = 0.2


def _leave_with_holder(grace_s: float) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # drains
    time.sleep(max(grace_s, _APART_S))
    os.kill(os.getpid(), signal.SIGTERM)  # hands back
    time.sleep(_HAND_BACK_S)
    # What is below it ends with its pipes.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_holder, args=(float(sys.argv[1]),), name="life-line", daemon=True).start()
    sys.exit(main(["start"]))
