"""The fork servers of a host: started before its engines, started again if they die, ended after them."""

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

from ..forking import workers_address

COMMAND = (sys.executable, "-m", "penstock.worker.engine.fork_server")
WORKER_COMMAND = (sys.executable, "-m", "penstock.worker.serving.fork_server")
# Of the option --fork-server: the address of one that somebody else keeps, for all who see the variable.
FORK_SERVER_VARIABLE = "PENSTOCK_FORK_SERVER"
# One that dies at once would do so again: cores and worker processes are started by themselves meanwhile.
RESTART_DELAY_S = 2.0
# It ends with its last core, which its engine has ended before.
END_TIMEOUT_S = 5.0
# A host of many engines starts them all at once.
_BACKLOG = 128

log = structlog.get_logger()


@contextmanager
def running_fork_server(
    options: Sequence[str] = (), command: Sequence[str] = COMMAND, worker_command: Sequence[str] = WORKER_COMMAND
) -> Iterator[str]:
    """Run the fork servers and give the socket of that of cores; everybody on this host may ask there.

    Args:
        options: of the command line of that of cores.
        command: its program.
        worker_command: that of the other, which forks worker processes; its socket is ``workers_address``.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-fork-") as folder, ExitStack() as keeping:
        address = str(Path(folder) / "socket")
        try:
            for at, words in ((workers_address(address), worker_command), (address, [*command, *options])):
                keeper = _Keeper(at, words)
                keeping.callback(keeper.end)
                keeper.start()
        except OSError as error:
            remedy = "cores and worker processes are started by themselves"
            log.warning("fork_server_not_started", error=str(error), remedy=remedy)
            address = ""
        yield address


class _Keeper:
    """Keeps one fork server alive from a thread: the supervisor's loop has no part in it."""

    def __init__(self, address: str, command: Sequence[str]) -> None:
        self._address = address
        self._command = command
        self._is_ending = threading.Event()
        self._replacing = threading.Lock()
        self._process = self._spawn()
        self._thread = threading.Thread(target=self._keep, name="fork-server", daemon=True)

    def start(self) -> None:
        """Watch it from now on."""
        self._thread.start()

    def end(self) -> None:
        """Let it end, by force if it does not; nothing is left of it afterwards."""
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
        # Bound here and closed here: who connects is never refused while it imports, and is at once when it has died.
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
                    # No room for another process: worker processes have the same trouble, and say so.
                    log.warning("fork_server_not_restarted", error=str(error))
                    return
