"""Messages between a fleet's driver and its agents, encoded as MessagePack and passed as bytes through Ray's calls."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ...shared.messages import WIRE_VERSION
from ...shared.values.shown import MaskedRepr


class AgentPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"
    ENDED = "ended"


class AgentSpec(MaskedRepr, msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Specification of an agent's worker.

    Args:
        worker_name: name of its ``worker start``, the same on every host and after every restart.
        options: options of ``worker start``, by environment variable. They may contain secrets, which are readable for
            users who may read the arguments of the cluster's actors.
        grace_s: how long its requests may run on after the agent has died; 0 releases them immediately.
    """

    version: int = WIRE_VERSION
    worker_name: str
    options: dict[str, str] = {}
    grace_s: float = 0.0


class AgentStatus(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Status of an agent and its worker.

    Args:
        pid: process id of its ``worker start``; with ``worker_name`` it is the prefix of the worker's id.
        exit_status: exit status of the worker; the negative number of a signal that killed it. None while it runs.
        last_words: last lines of the worker's log, once it has exited.
    """

    version: int = WIRE_VERSION
    worker_name: str
    host: str
    agent_pid: int
    pid: int
    phase: AgentPhase
    exit_status: int | None = None
    last_words: list[str] = []

    @property
    def worker_prefix(self) -> str:
        """Prefix of its worker's id."""
        return f"{self.worker_name}-{self.pid}-"

    @property
    def cause(self) -> str:
        """Why it ended, for people."""
        status = self.exit_status or 0
        how = f"signal {-status}" if status < 0 else f"status {status}"
        message = next((line for line in reversed(self.last_words) if line.startswith("error: ")), "")
        return message.removeprefix("error: ") or f"worker start ended with {how} on {self.host}"
