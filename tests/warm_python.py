"""A Python whose imports are done: programs that the tests start are forked from a process that has what they need.

A program that imports torch and transformers computes for 4 to 5 seconds before its first line. ``make test`` imports
all of that once (``forked_lanes.py``); a child of that process waits for programs at a socket. What tests start instead
of ``sys.executable`` is a script that hands over its command line, folder, environment and descriptors, and ends as
the program does. Whoever kills it kills the program and its group.

It is for tests of what a program does, not of how it starts: modules that it imports are there, whatever its
environment says, and no module of ours may do at its import what the program needs done. Each program is started in the
ordinary way by one test as well.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import logging
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from penstock.ops import local_server, local_worker
from penstock.worker.forked_child import be_child

# Where the script is; not there in a run without lanes, in which programs are started.
WARM_PYTHON_VARIABLE = "PENSTOCK_TEST_WARM_PYTHON"

# Standard streams, and what is inherited beside them.
_MAX_DESCRIPTORS = 64
_AWAY = 512

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
    """A program that is forked as those of the script are, with no script between: as ``subprocess.Popen``, of what
    starts with ``sys.executable``. Its process id is its own, so it can be stopped, killed and looked at.

    Args:
        stdout: a file, or ``PIPE`` for ``stdout`` of text.
        stderr: a file; by default that of this process.
    """

    def __init__(self, command: Sequence[str], *, stdout: Any, stderr: Any = 2, **others: object) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(Path(os.environ[WARM_PYTHON_VARIABLE]).with_name("socket")))
        ours, theirs = os.pipe() if stdout is subprocess.PIPE else (-1, os.dup(stdout.fileno()))
        self.stdout = open(ours) if ours >= 0 else None  # noqa: SIM115  # whose process it is closes it
        request = json.dumps([*command[:1], command[1:], os.getcwd(), dict(os.environ), [0, 1, 2]]).encode()
        nothing = os.open(os.devnull, os.O_RDONLY)
        streams = [nothing, theirs, stderr if isinstance(stderr, int) else stderr.fileno()]
        socket.send_fds(self._server, [len(request).to_bytes(4, "big")], streams)
        self._server.sendall(request)
        for descriptor in (nothing, theirs):
            os.close(descriptor)
        told, (self._pidfd,), _, _ = socket.recv_fds(self._server, 16, 1)
        self.pid = int(told.split()[0])
        self._told, self._ending = told, threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with self._ending:
            if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
                words = (self._told + self._server.makefile("rb").read()).split()
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


def start_program_server(folder: Path) -> tuple[str, int]:
    """Fork one, and write the script for it into ``folder``, which is empty.

    Returns:
        The script's path, and a descriptor: when its last holder has gone the server ends.
    """
    address, script = str(folder / "socket"), folder / "python"
    script.write_text(_SCRIPT.format(python=sys.executable, address=address))
    script.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    lifeline, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        _serve(listener, lifeline)
    listener.close()
    os.close(lifeline)
    return str(script), held


def _serve(listener: socket.socket, lifeline: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while lifeline not in select.select([listener, lifeline], [], [])[0]:
        # Here and not by ignoring SIGCHLD: what programs have computed is told of who waits for them (``cost.py``).
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        connection, _ = listener.accept()
        if os.fork() == 0:
            try:
                listener.close()
                os.close(lifeline)
                _watch_over(connection)
            finally:
                os._exit(1)
        connection.close()
    os._exit(0)


def _watch_over(connection: socket.socket) -> None:
    """Run one program: hand on signals, kill it when nobody waits for it any more, tell how it ended."""
    size, descriptors, _, _ = socket.recv_fds(connection, 4, _MAX_DESCRIPTORS)
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 16)
    pid = os.fork()
    if pid == 0:
        connection.close()
        executable, words, folder, environment, numbers = json.loads(request)
        there = dict(zip(numbers, descriptors, strict=True))
        be_child(partial(_become_program, executable, words, folder, environment, there))
    pidfd = os.pidfd_open(pid)
    with suppress(OSError):
        socket.send_fds(connection, [f"{pid} ".encode()], [pidfd])
    while pidfd not in select.select([connection, pidfd], [], [])[0]:
        number = b""
        # Whoever is gone without having read the message above has reset the connection.
        with suppress(ConnectionResetError):
            number = connection.recv(1)
        if number:
            os.kill(pid, number[0])
        else:
            os.killpg(pid, signal.SIGKILL)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(str(status).encode())


def _become_program(
    executable: str, words: list[str], folder: str, environment: dict[str, str], descriptors: dict[int, int]
) -> int:
    os.setsid()
    # Out of the way first: what one has now may be the number that another is to have.
    away = {number: fcntl.fcntl(has, fcntl.F_DUPFD_CLOEXEC, _AWAY) for number, has in descriptors.items()}
    for number, source in away.items():
        os.dup2(source, number)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _begin_anew(executable)
    return _status_of(words)


def _begin_anew(executable: str) -> None:
    """Undo what the process of the tests has done to the interpreter."""
    import structlog

    sys.executable = executable
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for as long as the process is there
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    structlog.reset_defaults()
    logging.getLogger().handlers.clear()
    # Those that Python begins with; in tests warnings are errors.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    # Deployments that the program starts, as those of a test.
    local_worker.start_program = local_server.start_program = WarmProgram
    forget_exit_handlers()
    gc.enable()


def forget_exit_handlers() -> None:
    """What is to be done at the end of the process from which this one was forked is not to be done at its own."""
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def end_as_python_does() -> None:
    """Wait for threads and call exit handlers, as the interpreter does before it is taken down."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _status_of(words: list[str]) -> int:
    try:
        _run(words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
        else:
            sys.stderr.write(f"{ended.code}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    end_as_python_does()
    return status & 0xFF


def _run(words: list[str]) -> None:
    """As ``python`` does with ``-m MODULE …`` and ``SCRIPT …``."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        _, name, *rest = words
        sys.path.insert(0, os.getcwd())
        is_package = hasattr(sys.modules.get(name), "__path__")
        # Else it is said to have been imported before.
        sys.modules.pop(f"{name}.__main__" if is_package else name, None)
        sys.argv = ["-m", *rest]
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    main.__file__ = words[0]
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
