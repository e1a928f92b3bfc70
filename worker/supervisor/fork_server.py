"""Fork servers of a host: started before its engines, restarted if they die, ended after the engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from ..processes.forking import workers_address

COMMAND = (sys.executable, "-m", "penstock.worker.engine.fork_server")
WORKER_COMMAND = (sys.executable, "-m", "penstock.worker.serving.fork_server")
# Environment variable of the option --fork-server: the address of a fork server that another process keeps.
FORK_SERVER_VARIABLE = "PENSTOCK_FORK_SERVER"
# A fork server that dies at its start would die again. Cores and worker processes are spawned meanwhile.
RESTART_DELAY_S = 2.0
# It ends with its last core, which its engine ends first.
END_TIMEOUT_S = 5.0
# A host of many engines starts all of them at the same time.
_BACKLOG = 128

log = structlog.get_logger()


@contextmanager
def running_fork_server(
    options: Sequence[str] = (), command: Sequence[str] = COMMAND, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[str]:
    """Run the fork servers, and yield the socket address of the one that forks cores.

    Yields an empty string if they cannot be started. Any process of this user may connect to the socket.

    Args:
        options: command line options of the fork server of cores.
        command: its program.
        worker_command: program of the fork server of worker processes, whose socket is ``workers_address``.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-fork-") as folder, ExitStack() as keeping:
        address = str(Path(folder) / "socket")
        try:
            for socket_path, words in ((workers_address(address), worker_command), (address, [*command, *options])):
                keeper = _Keeper(socket_path, words)
                keeping.callback(keeper.end)
                keeper.start()
        except OSError as error:
            remedy = "cores and worker processes are spawned instead, which takes longer"
            log.warning("fork_server_not_started", error=str(error), remedy=remedy)
            address = ""
        yield address


class _Keeper:
    """Keeps one fork server alive, in a thread apart from the supervisor's event loop."""

    def __init__(self, address: str, command: Sequence[str]) -> None:
        self._address = address
        self._command = command
        self._is_ending = threading.Event()
        self._replacing = threading.Lock()
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._keep, name="fork-server", daemon=True)

    def start(self) -> None:
        """Start watching it."""
        self._thread.start()

    def end(self) -> None:
        """End it, by SIGKILL after ``END_TIMEOUT_S``, and wait for its end."""
        with self._replacing:
            self._is_ending.set()
            process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._thread.join()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # Bound and closed here, so that a connection waits while the server imports, and is refused after its death.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            Path(self._address).unlink(missing_ok=True)
            listener.bind(self._address)
            os.chmod(self._address, 0o600)
            listener.listen(_BACKLOG)
            return subprocess.Popen(
                [*self._command, "--listen-fd", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )

    def _keep(self) -> None:
        while True:
            status = self._process.wait()
            if self._is_ending.is_set():
                return
            log.warning("fork_server_ended", status=status, restart_in_s=RESTART_DELAY_S)
            if self._is_ending.wait(RESTART_DELAY_S):
                return
            with self._replacing:
                if self._is_ending.is_set():
                    return
                try:
                    self._process = self._spawn()
                except OSError as error:
                    # The host cannot start another process. Worker processes fail in the same way and report it.
                    log.warning("fork_server_not_restarted", error=str(error))
                    return
