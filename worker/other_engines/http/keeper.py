"""Run a server until standard input closes: ``PYTHON -m penstock.worker.other_engines.http.keeper WORD…``.

The core holds the other end, so the server ends with the core, whatever ends that. The server's whole process group is
killed. If the server exits itself, its status and last lines are written to standard output.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress

import msgspec

NUM_LAST_LINES = 20
_MAX_LINE_CHARS = 500
_PR_SET_PDEATHSIG = 1
# Its last lines may still be in the pipe.
_LAST_LINES_TIMEOUT_S = 10.0


class Report(msgspec.Struct, frozen=True):
    """Exit of a server: its ``Popen.returncode``, None if it could not be started, and its last lines."""

    returncode: int | None
    last_words: list[str]


def main(words: list[str]) -> None:
    """Start the server and wait until it exits, or until the core has exited."""
    # Ignore signals of a terminal, because the worker process drains first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    try:
        server = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Kill the server if this process is killed.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        _write_report(Report(None, [str(error)]))
        return
    lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    reading = threading.Thread(target=_collect_lines, args=(server, lines), daemon=True)
    reading.start()
    threading.Thread(target=_await_end_of_core, args=(server.pid,), daemon=True).start()
    returncode = server.wait()
    # Processes that it has started would keep its output open.
    _kill_group(server.pid)
    reading.join(_LAST_LINES_TIMEOUT_S)
    _write_report(Report(returncode, list(lines)))


def _collect_lines(server: subprocess.Popen[bytes], lines: deque[str]) -> None:
    assert server.stdout is not None
    for line in server.stdout:
        lines.append(line.decode(errors="replace").rstrip()[:_MAX_LINE_CHARS])


def _await_end_of_core(group: int) -> None:
    # Without `sys.stdin`, whose lock this thread would hold when the other one ends the process.
    while os.read(0, 1):
        pass
    _kill_group(group)
    os._exit(0)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _write_report(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
