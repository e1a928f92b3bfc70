"""What a fleet's driver and its agents tell each other: MessagePack of these structs, as bytes through Ray's calls."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ...shared.messages import WIRE_VERSION
from ...shared.urls import MaskedRepr


class AgentPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"
    ENDED = "ended"


class AgentSpec(MaskedRepr, msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """What an agent holds.

    Args:
        worker_name: of its ``worker start``, the same wherever and however often it is started.
        options: of ``worker start``, by environment variable. They may hold secrets: those who may read the arguments
            of the cluster's actors may read them.
        grace_s: how long what it runs may run on when the agent has died; 0 hands it back at once.
    """

    version: int = WIRE_VERSION
    worker_name: str
    options: dict[str, str] = {}
    grace_s: float = 0.0


class AgentStatus(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """What an agent knows of what it holds.

    Args:
        pid: of its ``worker start``; with ``worker_name`` it begins the worker's id.
        exit_status: once it has ended; negative: the signal that it died of.
        last_words: the last lines of its log, once it has ended.
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
        """What the id of its worker begins with."""
        return f"{self.worker_name}-{self.pid}-"

    @property
    def cause(self) -> str:
        """Why it ended, for people."""
        status = self.exit_status or 0
        how = f"signal {-status}" if status < 0 else f"status {status}"
        said = next((line for line in reversed(self.last_words) if line.startswith("error: ")), "")
        return said.removeprefix("error: ") or f"worker start ended with {how} on {self.host}"
