"""What the broker's contract says of a history: the model that the real one is compared with after every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.shared.queue.lifecycle import MOVES, RequestState

BANDS = ("interactive", "standard", "batch")
# The last one may have so many requests under way; the others any number.
TENANTS = ("t0", "t1", "narrow")
MAX_CONCURRENT = 1
# An engine takes its own in front of a head among so many of a lane, its head included.
LOOK_AHEAD = 16
MAX_LANES_LEFT = 8


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
    # What it makes known of the engine that it comes to, and the engine that it was marked for as it came.
    own_digests: tuple[str, ...] = ()
    warm: str = ""
    # What it has gone through: each state, and its tokens then.
    moves: list[tuple[RequestState, int]] = field(default_factory=lambda: [(RequestState.QUEUED, 0)])

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
        self.moves.append((state, len(self.tokens)))

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


@dataclass(frozen=True)
class ExpectedRoom:
    """Sequences of an engine as its last claim left them."""

    seqs: int
    held: int


class ExpectedQueue:
    """Requests by id in order of their last arrival, engines that hold a lease, and whether the queue is paused.

    ``is_patient``: others leave what is warm for an engine to it, for longer than a history lasts; else not at all.
    """

    def __init__(self, order: str, *, is_patient: bool = False) -> None:
        self.order = order
        self.is_patient = is_patient
        # Of each digest, the engine that was given such a request last.
        self.warm: dict[str, str] = {}
        self.rooms: dict[str, ExpectedRoom] = {}
        self.requests: dict[str, ExpectedRequest] = {}
        self.leases: set[str] = set()
        # Devices that may wake the model, with their level, and those that wake it now.
        self.homes: dict[str, int] = {}
        # Homes that have given the model up.
        self.broken_homes: set[str] = set()
        self.grants: set[str] = set()
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

    def claimable(self, engine: str, limit: int, ward: str) -> bool:
        """Whether there is anything to hand to an engine that holds nothing."""
        if self.is_paused:
            return False
        lanes = [lane for lane in self.lanes().values() if self.may_start(self.requests[lane[0]].tenant)]
        is_left = self.left_to_others(engine, ExpectedRoom(limit, 0), ward)
        free = [lane for lane in lanes if not is_left(self.first_in(lane)) or self.own_in(lane, engine)]
        if len(lanes) - len(free) >= MAX_LANES_LEFT:
            free = []  # it need not look further
        return bool(free) or any(request.is_returned for request in self.requests.values())

    def own_in(self, lane: list[str], engine: str) -> list[str]:
        """Return what an engine may take in front of a lane's head."""
        return [one for one in lane[:LOOK_AHEAD] if self.requests[one].warm == engine and self.order == "fcfs"]

    def left_to_others(self, engine: str, room: ExpectedRoom, ward: str) -> Callable[[str], bool]:
        """Return what says whether an engine with this room, which claims now, has to leave a request to the one that
        is warm for it: that lives and claims, has room, and does not hold much more than its part.
        """
        rooms = {**self.rooms, engine: room}
        num_waiting = sum(request.is_fresh for request in self.requests.values())
        part = (sum(one.held for one in rooms.values()) + num_waiting) / sum(one.seqs for one in rooms.values())

        def is_left(request_id: str) -> bool:
            warm = self.requests[request_id].warm
            if not self.is_patient or warm in ("", engine, ward) or not {warm} <= self.rooms.keys() & self.leases:
                return False
            held, seqs = self.rooms[warm].held, self.rooms[warm].seqs
            return held < seqs and held <= 1.5 * part * seqs + seqs / 8

        return is_left

    def mark(self, digests: Sequence[str]) -> str:
        """The engine that a request with these is marked for: the first that is known of them and claims."""
        known = (self.warm.get(digest, "") for digest in digests)
        return next((engine for engine in known if engine in self.rooms and engine in self.leases), "")

    def warm_for(self) -> dict[str, set[str]]:
        """Return what waits in lanes with a mark, by engine."""
        marked: dict[str, set[str]] = {}
        for request_id, request in self.requests.items():
            if request.is_fresh and request.warm:
                marked.setdefault(request.warm, set()).add(request_id)
        return marked

    def expire(self, *, running_too: bool) -> int:
        """End what is past its deadline, which is then 0; returns how many."""
        due = [
            r for r in self.alive().values() if r.deadline == 0 and (running_too or r.state is not RequestState.CLAIMED)
        ]
        for request in due:
            request.end_from_outside(RequestState.EXPIRED)
        return len(due)

    @property
    def is_served(self) -> bool:
        return bool(self.leases or self.homes.keys() - self.broken_homes)

    @property
    def is_given_up(self) -> bool:
        return bool(self.broken_homes) and not self.is_served

    def end_given_up(self) -> None:
        """A home has given the model up: all that waits ends, if no other home is left."""
        for request in self.requests.values():
            if self.is_given_up and request.state is RequestState.QUEUED:
                request.end_from_outside(RequestState.FAILED)

    def end_unserved(self) -> None:
        if self.is_served:
            return
        for request in self.requests.values():
            if request.fail_fast and request.alive:
                request.end_from_outside(RequestState.FAILED)
