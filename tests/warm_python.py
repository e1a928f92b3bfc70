"""A Python with its imports done: programs that the tests start are forked from a process that has their modules.

A program that imports torch and transformers computes for 4 to 5 seconds before its first line. In ``make test`` one
process imports all of that once, and waits for programs at a socket (``program_server.py``). Tests start, instead
of ``sys.executable``, a script that hands over its command line, folder, environment and descriptors, and ends as
the program does. Whoever kills it kills the program and its group.

It is for tests of a program's work, not of its start: modules that it imports are there, whatever its
environment says, and no module of ours may at its import prepare anything for the program. Each program is started in
the ordinary way by one test as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Where the script is; not there in a run without lanes, in which programs are started.
WARM_PYTHON_VARIABLE = "PENSTOCK_TEST_WARM_PYTHON"
# Another, of programs that need no torch.
LIGHT_PYTHON_VARIABLE = "PENSTOCK_TEST_LIGHT_PYTHON"

# With as little of Python as can be: ten milliseconds.
_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
given = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        given.append(number)
    except OSError:
        pass  # with which the folder was read
if sys.argv[1:2] == ["-c"] or sys.argv[1:3] == ["-m", "pytest"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
request = json.dumps([__file__, sys.argv[1:], os.getcwd(), dict(os.environ), given]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], given)
server.sendall(request)
answer = server.makefile("rb").read().split()
status = int(answer[1]) if len(answer) > 1 else -signal.SIGKILL
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class WarmProgram:
    """A program that is forked as those of the script are, with no script between: as ``subprocess.Popen``, of commands
    that start with ``sys.executable``. Its process id is its own, so it can be stopped, killed and looked at.

    Args:
        stdout: a file, or ``PIPE`` for ``stdout`` of text.
        stderr: a file; by default that of this process.
    """

    def __init__(self, command: Sequence[str], *, stdout: Any, stderr: Any = 2, **others: object) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(address_in(Path(os.environ[LIGHT_PYTHON_VARIABLE]).parent)))
        ours, theirs = os.pipe() if stdout is subprocess.PIPE else (-1, os.dup(stdout.fileno()))
        self.stdout = open(ours) if ours >= 0 else None  # noqa: SIM115  # whose process it is closes it
        request = json.dumps([*command[:1], command[1:], os.getcwd(), dict(os.environ), [0, 1, 2]]).encode()
        nothing = os.open(os.devnull, os.O_RDONLY)
        streams = [nothing, theirs, stderr if isinstance(stderr, int) else stderr.fileno()]
        socket.send_fds(self._server, [len(request).to_bytes(4, "big")], streams)
        self._server.sendall(request)
        for descriptor in (nothing, theirs):
            os.close(descriptor)
        answer, (self._pidfd,), _, _ = socket.recv_fds(self._server, 16, 1)
        self.pid = int(answer.split()[0])
        self._told, self._ending = answer, threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with self._ending:
            if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
                with self._server.makefile("rb") as answer:
                    words = (self._told + answer.read()).split()
                self.returncode = int(words[1])
                self._server.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._pidfd], [], [], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a warm program", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)


def light_python() -> str:
    """Return the executable of programs that need no torch: forked ones in a run with lanes.

    A forked program shows the command line of its server, and is no child of the process that started it.
    """
    return os.environ.get(LIGHT_PYTHON_VARIABLE, sys.executable)


def write_script(folder: Path) -> Path:
    """Write the script that replaces ``sys.executable``; ``address_in(folder)`` is the server's address."""
    script = folder / "python"
    script.write_text(_SCRIPT.format(python=sys.executable, address=str(address_in(folder))))
    script.chmod(0o700)
    return script


def address_in(folder: Path) -> Path:
    return folder / "socket"
