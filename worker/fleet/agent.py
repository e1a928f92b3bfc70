"""The actor of one bundle: it holds a ``worker start`` as its child, says how that is, and lets it leave.

To a reader of vLLM this is ``DPEngineCoreActor``, with a worker in place of a core: the constructor is its
``__init__``, ``status`` its ``wait_for_init``, and the child its ``run``. Nothing that a request needs goes through it.

The child has a process of its own because a supervisor wants the main thread and its signals, which in an actor are
Ray's. Its standard input is its life line: whatever ends the actor's process ends the child (``worker/cli/held.py``).
What comes and goes are bytes (``wire.py``): Ray would pickle anything else.
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
from ...shared.service_manager import environment_of_children
from ..options.program import CONFIG_VARIABLE
from ..process_tree import kill_process_tree
from ..programs import START
from .wire import AgentPhase, AgentSpec, AgentStatus

_MODULE = "penstock.worker.cli.held"
# What is kept of the log, for the reason of an end.
_NUM_LAST_WORDS = 20
# The child ends a drain by itself; these are for what follows it (supervisor.py).
DRAIN_MARGIN_S = 4.0
HAND_BACK_S = 13.0


class HostAgent:
    """Starts the child at once. Methods may be called from several threads.

    Args:
        spec: an ``AgentSpec``.

    Raises:
        ValidationError: ``spec`` is none, as when driver and host have versions that do not go together.
    """

    def __init__(self, spec: bytes) -> None:
        try:
            self._spec = msgspec.msgpack.decode(spec, type=AgentSpec)
        except msgspec.DecodeError as error:
            raise ValidationError(
                f"an agent's specification cannot be read: {error}; install the same penstock on all hosts"
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
        """Return an ``AgentStatus``; the first answer says that the agent is there."""
        status = self._child.poll()
        if status is not None:
            for reader in self._readers:
                # Whom the child has left behind may hold its pipes for a moment.
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
            )
        )

    def drain(self, timeout_s: float) -> bytes:
        """Let the child finish what runs for ``timeout_s``, hand back the rest and end; returns its ``AgentStatus``.

        A second call with a shorter time is in a greater hurry. When one has returned nothing of the child is left.
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
        """This process's, with the driver's options in place of its own; the child has nothing to do with Ray."""
        own = {CONFIG_VARIABLE, *(option.variable for option in START.options)}
        secret = {f"{variable}_FILE" for variable in own}
        inherited = {
            name: value
            for name, value in environment_of_children().items()
            if name not in own | secret and not name.startswith("RAY_")
        }
        return {**inherited, **self._spec.options, "PENSTOCK_WORKER_NAME": self._spec.worker_name}

    def _read_output(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._is_ready = self._is_ready or line.startswith("ready")

    def _read_log(self) -> None:
        """The child's log goes on into the actor's, which is where Ray's users look."""
        assert self._child.stderr is not None
        with self._child.stderr as lines:
            for line in lines:
                self._last_words.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()
