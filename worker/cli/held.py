"""``python -m penstock.worker.cli.held GRACE_S``: a ``worker start`` that exits when its standard input closes.

Another process holds the other end. When that process dies, for whatever reason, the worker finishes requests for
``GRACE_S`` seconds, releases the others and exits. Its options come from the environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from . import main

# The supervisor releases requests within ten seconds and then kills its engines; after this time it hangs itself.
_HAND_BACK_S = 12.0
# Two pending signals would be delivered as one.
_APART_S = 0.2


def _leave_with_holder(grace_s: float) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # drains
    time.sleep(max(grace_s, _APART_S))
    os.kill(os.getpid(), signal.SIGTERM)  # releases requests
    time.sleep(_HAND_BACK_S)
    # Its child processes end when their pipes close.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_holder, args=(float(sys.argv[1]),), name="life-line", daemon=True).start()
    sys.exit(main(["start"]))
