"""Records of requests, tenants and engines during a simulation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..statistics import jain_index
from .scenario import Tenants

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Words:
    """A turn of a session: the delay after the last one's end, and the new tokens of its prompt."""

    after_s: float
    num_new: int
    num_output: int


@dataclass(slots=True)
class Note:
    """A request. Times in virtual seconds; ``None`` until it happens."""

    request_id: str
    group: Tenants
    tenant: str
    arrived_s: float
    num_prompt: int
    num_output: int
    # Of a session: its name, the number of the turn, the remaining turns, and how many tokens of the turn before an
    # engine can have cached, and its engine had cached.
    session: str = ""
    turn: int = 0
    later: list[Words] = field(default_factory=list)
    num_findable: int = 0
    num_found: int = 0
    partition: int = 0
    claimed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    # Time since which it waits for another engine; None while it runs or before.
    lost_s: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that the client asks for."""
        return self.num_output if self.group.knows_length else self.group.most_tokens


@dataclass
class Loss:
    """A death: the requests of the dead engines, and the times until each was claimed and resumed."""

    at_s: float
    num_engines: int
    num_requests: int = 0
    claimed_after_s: list[float] = field(default_factory=list)
    next_token_after_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the fleet at one time. ``num_wanted`` is 0 without autoscaling."""

    at_s: float
    num_waiting: int
    num_running: int
    num_engines: int
    num_wanted: int

    @classmethod
    def total(cls, samples: Sequence[Sample]) -> Sample:
        """Return the sum of the samples of several models at one time."""
        return cls(
            samples[0].at_s,
            num_waiting=sum(sample.num_waiting for sample in samples),
            num_running=sum(sample.num_running for sample in samples),
            num_engines=sum(sample.num_engines for sample in samples),
            num_wanted=sum(sample.num_wanted for sample in samples),
        )


class Measures:
    """Collected measurements, from which ``report.py`` computes the figures."""

    def __init__(self) -> None:
        self.notes: dict[str, Note] = {}
        self.num_refused: Counter[str] = Counter()
        # Number of claims and of empty claims, by cause.
        self.num_claims: Counter[str] = Counter()
        self.num_wasted: Counter[str] = Counter()
        self.num_stale = 0
        # Tokens of prompts and outputs that an engine read again, because another had them in its cache.
        self.num_recomputed = 0
        self.samples: list[Sample] = []
        self.jain: list[tuple[float, float, int]] = []
        self.losses: list[Loss] = []
        self.longest_with_room_s = 0.0
        self.waiting: dict[str, Note] = {}
        # Requests of tenants without a quota that no engine has claimed yet, in order of arrival.
        self.unbound: dict[str, Note] = {}
        self._loss_of: dict[str, Loss] = {}
        self._num_waiting: Counter[str] = Counter()
        self._empty_s: dict[str, float] = {}
        self._computed: defaultdict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = {}
        self._with_room: dict[str, float] = {}

    @classmethod
    def of_all(cls, parts: Sequence[Measures]) -> Measures:
        """Return the measurements of several models together. Samples are of the same times, and are added up."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for part in parts:
            whole.notes |= part.notes
            whole.num_refused += part.num_refused
            whole.num_claims += part.num_claims
            whole.num_wasted += part.num_wasted
            whole.num_stale += part.num_stale
            whole.num_recomputed += part.num_recomputed
            whole.jain += part.jain
            whole.losses += part.losses
            whole.longest_with_room_s = max(whole.longest_with_room_s, part.longest_with_room_s)
        whole.jain.sort()
        whole.losses.sort(key=lambda loss: loss.at_s)
        whole.samples = [Sample.total(samples) for samples in zip(*(part.samples for part in parts), strict=True)]
        return whole

    def note_arrival(self, note: Note) -> None:
        self.notes[note.request_id] = note
        self._wait(note, note.arrived_s)

    def record_claim(self, request_id: str, at_s: float) -> Note:
        """Record that an engine claimed a request, and return the request."""
        note = self.notes[request_id]
        self.waiting.pop(request_id, None)
        self.unbound.pop(request_id, None)
        self._num_waiting[note.tenant] -= 1
        if not self._num_waiting[note.tenant]:
            self._empty_s[note.tenant] = at_s
        if note.claimed_s is None:
            note.claimed_s = at_s
        if note.lost_s is not None and (loss := self._loss_of.get(request_id)):
            loss.claimed_after_s.append(at_s - note.lost_s)
        return note

    def record_tokens(self, note: Note, num_tokens: int) -> None:
        """Record computed tokens of the prompt or the output."""
        self._computed[note.tenant] += num_tokens
        self._weights[note.tenant] = note.group.policy.weight

    def record_output(self, note: Note, at_s: float) -> None:
        """Record that the output of a request begins, or resumes on another engine."""
        if note.first_token_s is None:
            note.first_token_s = at_s
        if note.lost_s is not None:
            loss = self._loss_of.pop(note.request_id, None)
            if loss:
                loss.next_token_after_s.append(at_s - note.lost_s)
            note.lost_s = None

    def record_requeue(self, note: Note, at_s: float, loss: Loss | None) -> None:
        """Record the loss of a request's engine. It counts as waiting from then on, even if undetected."""
        if note.lost_s is None:
            note.lost_s = at_s
        if loss:
            loss.num_requests += 1
            self._loss_of[note.request_id] = loss
        self._wait(note, at_s)

    def record_window(self, at_s: float) -> None:
        """Record Jain's index of weighted tokens in the last window, over tenants that waited throughout."""
        waiting = [
            tenant
            for tenant, number in self._num_waiting.items()
            if number > 0 and self._empty_s.get(tenant, 0.0) <= at_s - WINDOW_S
        ]
        shares = [self._computed[tenant] / self._weights.get(tenant, 1.0) for tenant in waiting]
        self.jain.append((at_s, jain_index(shares), len(shares)))
        self._computed.clear()

    @property
    def oldest(self) -> Note | None:
        """Return the request that waits longest, of tenants without a quota; None if none waits."""
        return next(iter(self.unbound.values()), None)

    def record_capacity(self, at_s: float, with_room: Iterable[str]) -> None:
        """Record the engines with capacity for ``oldest``. To be called repeatedly.

        An engine counts from its first record without a gap. Among many engines one has always just freed capacity.
        """
        self._with_room = {engine_id: self._with_room.get(engine_id, at_s) for engine_id in with_room}
        if self._with_room and self.oldest is not None:
            since = max(min(self._with_room.values()), self.oldest.arrived_s)
            self.longest_with_room_s = max(self.longest_with_room_s, at_s - since)

    def _wait(self, note: Note, at_s: float) -> None:
        self.waiting[note.request_id] = note
        if not note.group.has_quota and note.claimed_s is None:
            self.unbound[note.request_id] = note
        if not self._num_waiting[note.tenant]:
            self._empty_s[note.tenant] = at_s
        self._num_waiting[note.tenant] += 1
