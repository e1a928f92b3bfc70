"""The interface of a cluster: places for the agents of a fleet, calls to them, and the messages of these calls.

Messages are encoded as MessagePack and passed as bytes through Ray's calls.
"""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Protocol

import msgspec

from ...shared.errors import PenstockError
from ...shared.messages import WIRE_VERSION
from ...shared.values.shown import MaskedRepr
from ..config.ranks import KEY_VARIABLE


class AgentUnreachableError(PenstockError):
    """An agent does not answer: it is starting, its process or its host has died, or it hangs."""

    code = "agent_unreachable"
    retryable = True


class AgentGoneError(AgentUnreachableError):
    """An agent will never answer: it could not be created, and the cluster does not retry."""

    code = "agent_gone"
    retryable = False


class Place(Protocol):
    """An agent at its current or future place in the cluster. The cluster restarts it after a death."""

    async def status(self, timeout_s: float) -> bytes:
        """Return the agent's ``AgentStatus``.

        Raises:
            AgentUnreachableError: the agent has not answered in time, or does not exist at present.
            AgentGoneError: the agent will never exist.
        """
        ...

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        """Call ``HostAgent.drain``. Raises as ``status``."""
        ...

    async def is_pending(self) -> bool:
        """Return whether no host has capacity for the agent at present."""
        ...

    async def leave(self) -> None:
        """End the agent and its worker, and release their resources. A second call does nothing."""
        ...


class FleetBackend(Protocol):
    """The cluster that runs a fleet.

    Attributes:
        name: name for people.
        most: largest number of places; None if unknown.
    """

    @property
    def name(self) -> str: ...

    @property
    def most(self) -> int | None: ...

    async def place(self, spec: bytes) -> Place:
        """Request resources for one agent and start it in them. Returns before they are available.

        Raises:
            AgentUnreachableError: the cluster itself does not answer.
        """
        ...


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


def specs_of_hosts(spec: bytes, num_hosts: int) -> list[bytes]:
    """Return the ``AgentSpec`` of each host of an engine, which share a new secret if there are several."""
    if num_hosts == 1:
        return [spec]
    decoded = msgspec.msgpack.decode(spec, type=AgentSpec)
    options = {**decoded.options, KEY_VARIABLE: secrets.token_hex(32)}
    # Hosts that only run ranks report nothing.
    of_others = {name: value for name, value in options.items() if name != "PENSTOCK_STAT_LOGGERS"}
    specs = [
        msgspec.structs.replace(decoded, options={**of_others, "PENSTOCK_NODE_RANK": str(rank)} if rank else options)
        for rank in range(num_hosts)
    ]
    return [msgspec.msgpack.encode(each) for each in specs]


class AgentStatus(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Status of an agent and its worker.

    Args:
        pid: process id of its ``worker start``; with ``worker_name`` it is the prefix of the worker's id.
        exit_status: exit status of the worker; the negative number of a signal that killed it. None while it runs.
        last_words: last lines of the worker's log, once it has exited.
        niceness: niceness of the agent and so of its worker; Ray sets 15 by default.
    """

    version: int = WIRE_VERSION
    worker_name: str
    host: str
    agent_pid: int
    pid: int
    phase: AgentPhase
    exit_status: int | None = None
    last_words: list[str] = []
    niceness: int = 0

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
