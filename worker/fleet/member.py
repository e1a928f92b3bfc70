"""One engine of a fleet, from the request for room to the end of its agent.

placed ──its agent answers──▶ starting ──ready──▶ serving ──told to leave──▶ leaving ──▶ gone
   ▲                                                 │
   └──the cluster starts its agent anew──────────────┘          its worker ended by itself: ended
"""

from __future__ import annotations

import time
from enum import IntEnum

import msgspec
import structlog

from .agent import DRAIN_MARGIN_S, HAND_BACK_S
from .ground import AgentGoneError, AgentUnreachableError, Place
from .wire import AgentPhase, AgentStatus

LOOK_TIMEOUT_S = 0.5
# Beyond what an agent needs at most: the way there and back.
_ANSWER_MARGIN_S = 10.0

log = structlog.get_logger()


class MemberPhase(IntEnum):
    """In the order in which members are given up: what has cost least goes first."""

    PLACED = 0
    STARTING = 1
    SERVING = 2
    LEAVING = 3
    ENDED = 4
    GONE = 5


class Member:
    """An agent in its place.

    Args:
        number: in the fleet; free again when it is gone.
        worker_name: of its worker.

    Attributes:
        status: what its agent said last.
        placed_at: on the monotonic clock, as all times here.
        unreachable_since: None while its agent answers.
        trouble: why it does not.
        has_served: whether it ever did.
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
        self.trouble = ""
        self.has_served = False

    @property
    def is_present(self) -> bool:
        """Whether it serves or is going to."""
        return self.phase <= MemberPhase.SERVING

    @property
    def cause_of_end(self) -> str:
        """Why it has ended, for people."""
        return self.trouble or (self.status.cause if self.status is not None else "")

    @property
    def worker_prefix(self) -> str:
        """What its worker's id begins with; that of no worker before its agent has answered."""
        return self.status.worker_prefix if self.status is not None else f"{self.worker_name}-0-"

    async def look(self) -> None:
        """Ask its agent how it is."""
        try:
            data = await self.place.status(LOOK_TIMEOUT_S)
        except AgentGoneError as error:
            self.phase, self.trouble = MemberPhase.ENDED, str(error)
            return
        except AgentUnreachableError as error:
            self._is_unreachable(str(error))
            return
        status = msgspec.msgpack.decode(data, type=AgentStatus)
        self.unreachable_since, self.trouble = None, ""
        if self.status is not None and status.pid != self.status.pid and self.is_present:
            log.warning("fleet_engine_restarted", worker=self.worker_name, host=status.host)
            self.phase = MemberPhase.STARTING
        self.status = status
        if self.is_present:
            self._follow(status)

    async def leave(self, drain_timeout_s: float) -> None:
        """Drain its worker, and give its room back; requests that do not end in time are handed back."""
        self.phase = MemberPhase.LEAVING
        if self.status is not None and self.unreachable_since is None:
            await self.hurry(drain_timeout_s)
        await self.give_up()

    async def hurry(self, drain_timeout_s: float) -> None:
        """Drain its worker, also while another drain with more patience goes on."""
        patience_s = drain_timeout_s + DRAIN_MARGIN_S + HAND_BACK_S + _ANSWER_MARGIN_S
        try:
            data = await self.place.drain(drain_timeout_s, patience_s)
        except AgentUnreachableError as error:
            # What its worker held moves by its lease.
            log.warning("fleet_engine_not_drained", worker=self.worker_name, error=str(error))
        else:
            self.status = msgspec.msgpack.decode(data, type=AgentStatus)

    async def give_up(self) -> None:
        """End its agent, whatever that does."""
        await self.place.leave()
        self.phase = MemberPhase.GONE

    def _follow(self, status: AgentStatus) -> None:
        if status.phase is AgentPhase.ENDED:
            self.phase = MemberPhase.ENDED
        elif status.phase is AgentPhase.SERVING and self.phase is not MemberPhase.SERVING:
            self.phase, self.has_served, self.serving_since = MemberPhase.SERVING, True, time.monotonic()
            took_s = round(self.serving_since - self.placed_at, 2)
            log.info("fleet_engine_serves", worker=self.worker_name, host=status.host, took_s=took_s)
        elif status.phase is AgentPhase.STARTING:
            self.phase = MemberPhase.STARTING

    def _is_unreachable(self, trouble: str) -> None:
        self.trouble = trouble
        if self.unreachable_since is None:
            self.unreachable_since = time.monotonic()
            log.warning("fleet_engine_unreachable", worker=self.worker_name, error=trouble)
