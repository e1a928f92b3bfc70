"""One engine of a fleet, from the request for resources to the end of its agent.

placed ──its agent answers──▶ starting ──ready──▶ serving ──``leave`` is called──▶ leaving ──▶ gone
   ▲                                                 │
   └──the cluster restarts its agent─────────────────┘          its worker exited unexpectedly: ended
"""

from __future__ import annotations

import time
from enum import IntEnum

import msgspec
import structlog

from .agent import DRAIN_MARGIN_S, HAND_BACK_S
from .backend import AgentGoneError, AgentPhase, AgentStatus, AgentUnreachableError, Place

POLL_TIMEOUT_S = 0.5
# Added to the longest time of an agent, for the call and the reply.
_ANSWER_MARGIN_S = 10.0

log = structlog.get_logger()


class MemberPhase(IntEnum):
    """State of a member, in the order in which members are drained: those that have cost least come first."""

    PLACED = 0
    STARTING = 1
    SERVING = 2
    LEAVING = 3
    ENDED = 4
    GONE = 5


class Member:
    """A member of a fleet: an agent and its worker. Times are monotonic seconds.

    Args:
        number: number in the fleet; reused after the member has exited.
        worker_name: name of its worker.

    Attributes:
        status: last status of its agent.
        placed_at: when its resources were requested.
        unreachable_since: since when its agent does not answer; None while it does.
        error: why the agent does not answer; empty while it does.
        has_served: whether it has ever served.
    """

    def __init__(self, number: int, worker_name: str, place: Place) -> None:
        self.number = number
        self.worker_name = worker_name
        self.place = place
        self.phase = MemberPhase.PLACED
        self.status: AgentStatus | None = None
        self.placed_at = time.monotonic()
        self.serving_since = 0.0
        self.unreachable_since: float | None = self.placed_at
        self.error = ""
        self.has_served = False

    @property
    def is_present(self) -> bool:
        """Whether it serves, or starts to."""
        return self.phase <= MemberPhase.SERVING

    @property
    def cause_of_end(self) -> str:
        """Why it has ended, for people."""
        return self.error or (self.status.cause if self.status is not None else "")

    @property
    def worker_prefix(self) -> str:
        """Prefix of its worker's id; one that matches no worker before its agent has answered."""
        return self.status.worker_prefix if self.status is not None else f"{self.worker_name}-0-"

    async def poll(self) -> None:
        """Request the status of its agent."""
        try:
            data = await self.place.status(POLL_TIMEOUT_S)
        except AgentGoneError as error:
            self.phase, self.error = MemberPhase.ENDED, str(error)
            return
        except AgentUnreachableError as error:
            self._mark_unreachable(str(error))
            return
        status = msgspec.msgpack.decode(data, type=AgentStatus)
        self.unreachable_since, self.error = None, ""
        if self.status is not None and status.pid != self.status.pid and self.is_present:
            log.warning("fleet_engine_restarted", worker=self.worker_name, host=status.host)
            self.phase = MemberPhase.STARTING
        self.status = status
        if self.is_present:
            self._apply(status)

    async def leave(self, drain_timeout_s: float) -> None:
        """Drain its worker, then release its resources; requests that do not end in time return to the queue."""
        self.phase = MemberPhase.LEAVING
        if self.status is not None and self.unreachable_since is None:
            await self.drain(drain_timeout_s)
        await self.give_up()

    async def drain(self, drain_timeout_s: float) -> None:
        """Drain its worker. A call with a shorter timeout shortens a drain in progress."""
        patience_s = drain_timeout_s + DRAIN_MARGIN_S + HAND_BACK_S + _ANSWER_MARGIN_S
        try:
            data = await self.place.drain(drain_timeout_s, patience_s)
        except AgentUnreachableError as error:
            # Its requests are reclaimed when its lease expires.
            log.warning("fleet_engine_not_drained", worker=self.worker_name, error=str(error))
        else:
            self.status = msgspec.msgpack.decode(data, type=AgentStatus)

    async def give_up(self) -> None:
        """End its agent immediately, and release its resources."""
        await self.place.leave()
        self.phase = MemberPhase.GONE

    def _apply(self, status: AgentStatus) -> None:
        if status.phase is AgentPhase.ENDED:
            self.phase = MemberPhase.ENDED
        elif status.phase is AgentPhase.SERVING and self.phase is not MemberPhase.SERVING:
            self.phase, self.has_served, self.serving_since = MemberPhase.SERVING, True, time.monotonic()
            took_s = round(self.serving_since - self.placed_at, 2)
            log.info(
                "fleet_engine_serves",
                worker=self.worker_name,
                host=status.host,
                took_s=took_s,
                niceness=status.niceness,
            )
        elif status.phase is AgentPhase.STARTING:
            self.phase = MemberPhase.STARTING

    def _mark_unreachable(self, error: str) -> None:
        self.error = error
        if self.unreachable_since is None:
            self.unreachable_since = time.monotonic()
            log.warning("fleet_engine_unreachable", worker=self.worker_name, error=error)
