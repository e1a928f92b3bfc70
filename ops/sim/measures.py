"""What a simulation notes of its requests, tenants and engines while it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..statistics import jain_index
from .scenario import Tenants

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Words:
    """A turn that comes so long after the last one has ended, with what is new of its prompt."""

    after_s: float
    num_new: int
    num_output: int


@dataclass(slots=True)
class Note:
    """One request. Times in virtual seconds; ``None`` until it happens."""

    request_id: str
    group: Tenants
    tenant: str
    arrived_s: float
    num_prompt: int
    num_output: int
    # Of a session: its name, the number of the turn, what is still to be said in it, and of the tokens of the turn
    # before how many an engine can have, and its engine had.
    session: str = ""
    turn: int = 0
    later: list[Words] = field(default_factory=list)
    num_findable: int = 0
    num_found: int = 0
    partition: int = 0
    claimed_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    # Since when it waits for another engine; None while it runs or before.
    lost_s: float | None = None

    @property
    def most_tokens(self) -> int:
        """What its client asks for."""
        return self.num_output if self.group.knows_length else self.group.most_tokens


@dataclass
class Loss:
    """A death: what the dead engines held, and how long each of those requests took to be claimed and to go on."""

    at_s: float
    num_engines: int
    num_requests: int = 0
    claimed_after_s: list[float] = field(default_factory=list)
    next_token_after_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at a moment. ``num_wanted`` is 0 without autoscaling."""

    at_s: float
    num_waiting: int
    num_running: int
    num_engines: int
    num_wanted: int

    @classmethod
    def total(cls, samples: Sequence[Sample]) -> Sample:
        """Of several models at one moment."""
        return cls(
            samples[0].at_s,
            num_waiting=sum(sample.num_waiting for sample in samples),
            num_running=sum(sample.num_running for sample in samples),
            num_engines=sum(sample.num_engines for sample in samples),
            num_wanted=sum(sample.num_wanted for sample in samples),
        )


class Measures:
    """Collects; ``report.py`` makes figures of it."""

    def __init__(self) -> None:
        self.notes: dict[str, Note] = {}
        self.num_refused: Counter[str] = Counter()
        # Claims by what led to them, all of them and those that got nothing.
        self.num_claims: Counter[str] = Counter()
        self.num_wasted: Counter[str] = Counter()
        self.num_stale = 0
        self.samples: list[Sample] = []
        self.jain: list[tuple[float, float, int]] = []
        self.losses: list[Loss] = []
        self.longest_with_room_s = 0.0
        self.waiting: dict[str, Note] = {}
        # In order of arrival: those of tenants without a quota that no engine has held yet.
        self.unbound: dict[str, Note] = {}
        self._loss_of: dict[str, Loss] = {}
        self._num_waiting: Counter[str] = Counter()
        self._empty_s: dict[str, float] = {}
        self._computed: defaultdict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = {}
        self._with_room: dict[str, float] = {}

    @classmethod
    def of_all(cls, parts: Sequence[Measures]) -> Measures:
        """What was noted of several models. Samples are of the same moments, and are added up."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for part in parts:
            whole.notes |= part.notes
            whole.num_refused += part.num_refused
            whole.num_claims += part.num_claims
            whole.num_wasted += part.num_wasted
            whole.num_stale += part.num_stale
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

    def note_claim(self, request_id: str, at_s: float) -> Note:
        """A request was handed to an engine; returns what is known of it."""
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

    def note_tokens(self, note: Note, num_tokens: int) -> None:
        """So many tokens of the prompt or the output were computed."""
        self._computed[note.tenant] += num_tokens
        self._weights[note.tenant] = note.group.policy.weight

    def note_output(self, note: Note, at_s: float) -> None:
        """The output of a request has begun, or goes on under another engine."""
        if note.first_token_s is None:
            note.first_token_s = at_s
        if note.lost_s is not None:
            loss = self._loss_of.pop(note.request_id, None)
            if loss:
                loss.next_token_after_s.append(at_s - note.lost_s)
            note.lost_s = None

    def note_put_back(self, note: Note, at_s: float, loss: Loss | None) -> None:
        """Its engine is gone; it counts as waiting from then on, though nobody may know it yet."""
        if note.lost_s is None:
            note.lost_s = at_s
        if loss:
            loss.num_requests += 1
            self._loss_of[note.request_id] = loss
        self._wait(note, at_s)

    def note_window(self, at_s: float) -> None:
        """Jain's index of what tenants got in the last window over their weights: of those that waited all the time."""
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
        """What waits longest, of tenants without a quota; None if nothing does."""
        return next(iter(self.unbound.values()), None)

    def note_room(self, at_s: float, with_room: Iterable[str]) -> None:
        """The engines that have room for ``oldest``; to be told again and again.

        An engine counts from when it was first told of, without a gap: of many, one has just ended something always.
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
