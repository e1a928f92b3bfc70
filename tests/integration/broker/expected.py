"""What the broker's contract says of a history: the model that the real one is compared with after every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.shared.request_state import MOVES, RequestState

BANDS = ("interactive", "standard", "batch")
# The last one may have so many requests under way; the others any number.
TENANTS = ("t0", "t1", "narrow")
MAX_CONCURRENT = 1


@dataclass
class ExpectedRequest:
    client: str
    fail_fast: bool
    tenant: str
    band: str
    num_tokens: int
    deadline: int | None
    state: RequestState = RequestState.QUEUED
    epoch: int = 0
    attempts: int = 0
    num_deaths: int = 0
    engine: str = ""
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0
    # Of its input; 0 unless it is resumable.
    num_chunks: int = 0
    num_segments: int = 0
    is_closed: bool = False

    @property
    def alive(self) -> bool:
        return not self.state.is_end

    @property
    def is_fresh(self) -> bool:
        """Whether it stands in its lane: it waits and was never claimed."""
        return self.state is RequestState.QUEUED and self.attempts == 0

    @property
    def is_returned(self) -> bool:
        return self.state is RequestState.QUEUED and self.attempts > 0

    @property
    def lane(self) -> str:
        return f"{self.band}:{self.tenant}"

    def move(self, state: RequestState, engine: str = "") -> None:
        """Go to a state that the table allows next; no history of the machine has another."""
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state, self.engine = state, engine

    def claimed_by(self, engine: str, epoch: int) -> None:
        assert epoch > self.epoch
        self.move(RequestState.CLAIMED, engine)
        self.epoch, self.attempts = epoch, self.attempts + 1

    def queue_again(self) -> None:
        self.move(RequestState.QUEUED)

    def extend(self, num_tokens: int) -> None:
        self.num_chunks, self.num_tokens = self.num_chunks + 1, self.num_tokens + num_tokens
        if self.state is RequestState.AWAITING_INPUT:
            self.move(RequestState.QUEUED)

    def end_segment(self) -> None:
        self.num_segments += 1
        if self.num_segments < self.num_chunks:
            self.queue_again()
        elif self.is_closed:
            self.end(RequestState.FINISHED)
        else:
            self.move(RequestState.AWAITING_INPUT)

    def end(self, state: RequestState) -> None:
        self.move(state)
        self.num_ends += 1

    def end_from_outside(self, state: RequestState) -> None:
        self.epoch += 1
        self.end(state)


class ExpectedQueue:
    """Requests by id in order of their last arrival, engines that hold a lease, and whether the queue is paused."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.requests: dict[str, ExpectedRequest] = {}
        self.leases: set[str] = set()
        # Engines whose last claim left room. They may have been woken since; their next claim tells.
        self.vacant: set[str] = set()
        self.is_paused = False

    def add(self, request_id: str, request: ExpectedRequest) -> None:
        self.requests.pop(request_id, None)
        self.requests[request_id] = request

    def alive(self) -> dict[str, ExpectedRequest]:
        return {request_id: r for request_id, r in self.requests.items() if r.alive}

    def held_by(self, engine: str) -> dict[str, ExpectedRequest]:
        return {request_id: r for request_id, r in self.requests.items() if r.engine == engine}

    def started(self, tenant: str = "") -> int:
        """Requests that were claimed and have not ended."""
        return sum(r.alive and r.attempts > 0 for r in self.requests.values() if tenant in ("", r.tenant))

    def may_start(self, tenant: str) -> bool:
        return tenant != TENANTS[-1] or self.started(tenant) < MAX_CONCURRENT

    def lanes(self) -> dict[str, list[str]]:
        """Requests of each lane that is not empty, in order of arrival."""
        lanes: dict[str, list[str]] = {}
        for request_id, request in self.requests.items():
            if request.is_fresh:
                lanes.setdefault(request.lane, []).append(request_id)
        return lanes

    def first_in(self, lane: list[str]) -> str:
        """The request whose turn it is: by arrival, or by deadline and then by arrival."""
        if self.order == "fcfs":
            return lane[0]
        return min(lane, key=self._deadline)

    def _deadline(self, request_id: str) -> float:
        deadline = self.requests[request_id].deadline
        return math.inf if deadline is None else deadline

    def claimable(self) -> bool:
        """Whether there is anything to hand to an engine that holds nothing."""
        waiting = [r for r in self.requests.values() if r.state is RequestState.QUEUED]
        return not self.is_paused and any(r.is_returned or self.may_start(r.tenant) for r in waiting)

    def expire(self, *, running_too: bool) -> int:
        """End what is past its deadline, which is then 0; returns how many."""
        due = [
            r for r in self.alive().values() if r.deadline == 0 and (running_too or r.state is not RequestState.CLAIMED)
        ]
        for request in due:
            request.end_from_outside(RequestState.EXPIRED)
        return len(due)

    def end_unserved(self) -> None:
        if self.leases:
            return
        for request in self.requests.values():
            if request.fail_fast and request.alive:
                request.end_from_outside(RequestState.FAILED)
