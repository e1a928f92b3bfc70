"""The actor of one bundle: it runs ``worker start`` as a child process, reports its status, and drains it.

For readers of vLLM: this corresponds to ``DPEngineCoreActor``, with a worker instead of a core. The constructor is its
``__init__``, ``status`` its ``wait_for_init``, and the child its ``run``. No request passes through it.

The worker is a separate process because a supervisor needs the main thread and its signals, which Ray uses in an actor.
The child ends when its standard input closes, so it ends with the actor's process (``worker/cli/held.py``). Arguments
and results are bytes (``backend.py``), because Ray would pickle anything else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque

import msgspec

from ...shared.errors import ValidationError
from ...shared.process.service_manager import environment_of_children
from ..config.ranks import KEY_VARIABLE
from ..options.program import CONFIG_VARIABLE
from ..processes.process_tree import kill_process_tree
from ..programs import START
from .backend import AgentPhase, AgentSpec, AgentStatus

_MODULE = "penstock.worker.cli.held"
# Last lines of the log that are kept, to report the reason of an exit.
_NUM_LAST_WORDS = 20
# The child limits its drain itself; these are the times for its further steps (supervisor.py).
DRAIN_MARGIN_S = 4.0
HAND_BACK_S = 13.0


class HostAgent:
    """Agent that starts its child in the constructor. Methods may be called from several threads.

    Args:
        spec: an encoded ``AgentSpec``.

    Raises:
        ValidationError: ``spec`` cannot be decoded, for example because driver and host have different versions.
    """

    def __init__(self, spec: bytes) -> None:
        try:
            self._spec = msgspec.msgpack.decode(spec, type=AgentSpec)
        except msgspec.DecodeError as error:
            raise ValidationError(
                f"an agent's specification cannot be decoded: {error}; install the same penstock on all hosts"
            ) from error
        self._lock = threading.Lock()
        self._is_ready = False
        self._is_leaving = False
        self._last_words: deque[str] = deque(maxlen=_NUM_LAST_WORDS)
        self._child = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(self._spec.grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(),
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=reader, name=reader.__name__, daemon=True)
            for reader in (self._read_output, self._read_log)
        ]
        for reader in self._readers:
            reader.start()

    def status(self) -> bytes:
        """Return an encoded ``AgentStatus``; the first reply shows that the agent exists."""
        status = self._child.poll()
        if status is not None:
            for reader in self._readers:
                # With a timeout, because processes that the child has started may hold its pipes briefly.
                reader.join(timeout=1.0)
        return msgspec.msgpack.encode(
            AgentStatus(
                worker_name=self._spec.worker_name,
                host=socket.gethostname(),
                agent_pid=os.getpid(),
                pid=self._child.pid,
                phase=self._phase(status),
                exit_status=status,
                last_words=list(self._last_words) if status is not None else [],
                niceness=os.getpriority(os.PRIO_PROCESS, 0),
            )
        )

    def drain(self, timeout_s: float) -> bytes:
        """Let the child finish requests for ``timeout_s``, release the others and exit. Returns an ``AgentStatus``.

        A second call with a shorter time shortens the drain. After a call has returned, the child has exited.
        """
        with self._lock:
            is_first = not self._is_leaving
            self._is_leaving = True
        if is_first:
            self._child.terminate()
        if not self._ends_within(timeout_s + DRAIN_MARGIN_S if timeout_s > 0 else 0.5):
            self._child.terminate()
            if not self._ends_within(HAND_BACK_S):
                kill_process_tree(self._child.pid)
                self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
        return self.status()

    def _phase(self, exit_status: int | None) -> AgentPhase:
        if exit_status is not None:
            return AgentPhase.ENDED
        if self._is_leaving:
            return AgentPhase.LEAVING
        return AgentPhase.SERVING if self._is_ready else AgentPhase.STARTING

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _environment(self) -> dict[str, str]:
        """Return this process's environment, with the driver's options instead of its own, without Ray's variables."""
        options = {CONFIG_VARIABLE, KEY_VARIABLE, *(option.variable for option in START.options)}
        secrets = {f"{variable}_FILE" for variable in options}
        inherited = {
            name: value
            for name, value in environment_of_children().items()
            if name not in options | secrets and not name.startswith("RAY_")
        }
        return {**inherited, **self._spec.options, "PENSTOCK_WORKER_NAME": self._spec.worker_name}

    def _read_output(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._is_ready = self._is_ready or line.startswith("ready")

    def _read_log(self) -> None:
        """Copy the child's log to the actor's log, where users of Ray read it."""
        assert self._child.stderr is not None
        with self._child.stderr as lines:
            for line in lines:
                self._last_words.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()
