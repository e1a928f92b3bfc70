"""A group of ranks, its collectives and its messages, as a state from which every next event can be tried.

The machines are the real ones. A collective is as gloo's: whoever enters it waits until all have, and they come
out one by one. Messages are lost, doubled and late.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter

from penstock.shared.messages.core import WavePhase
from penstock.worker.data_parallel.wave import Action, Flags, Wave

Event = tuple[str, int, int]
_all_of = attrgetter(*Wave.__slots__)


class RankAloneError(AssertionError):
    """Two ranks have entered different collectives."""


@dataclass
class Rank:
    """``work`` has the forwards that each request here still needs, ``at`` is how many collectives it has entered."""

    wave: Wave
    work: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    orders: tuple[str, ...] = ()
    at: int = 0
    # The collective or message that it waits for.
    enters: tuple[Action, Flags | None] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.work)

    def is_in(self, wave: int) -> bool:
        """Whether it is there, or has heard that it is to come."""
        is_running = self.wave.state.phase in (WavePhase.STARTING, WavePhase.RUNNING)
        return self.wave._last_start >= wave or (self.wave.number == wave and is_running) or self.wave.number > wave


@dataclass
class Group:
    """All of it. ``losses`` and ``doubles`` are how often a message may still be lost or come twice."""

    ranks: list[Rank]
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    losses: int = 0
    doubles: int = 0
    # The last collective, by its number: the value with which each rank has entered it.
    entered: dict[int, dict[int, tuple[Action, Flags | None]]] = field(default_factory=dict)
    num_forwards: int = 0
    last_sums: Flags | None = None

    def after(self, event: Event) -> Group:
        """Return the group after the event, with all other ranks the same; this group stays unchanged."""
        ranks, number = self.ranks[:], event[1]
        ranks[number] = replace(ranks[number], wave=replace(ranks[number].wave))
        following = Group(
            ranks,
            Counter(self.messages),
            self.losses,
            self.doubles,
            {number: dict(ranks) for number, ranks in self.entered.items()},
            self.num_forwards,
            self.last_sums,
        )
        following.happen(event)
        return following

    def key(self) -> tuple[object, ...]:
        """Equal for states whose futures are equal."""
        first = min(rank.at for rank in self.ranks)
        ranks = tuple(
            (
                _all_of(rank.wave),
                rank.work,
                rank.arrivals,
                rank.orders,
                rank.at - first,
                rank.enters,
            )
            for rank in self.ranks
        )
        entries = {number: tuple(sorted(of.items(), key=itemgetter(0))) for number, of in self.entered.items()}
        entered = tuple((number - first, pairs) for number, pairs in entries.items())
        return ranks, tuple(sorted(self.messages.items())), self.losses, self.doubles, entered, self.last_sums

    def events(self) -> list[Event]:
        """Return the events that may come next."""
        events: list[Event] = []
        for number, rank in enumerate(self.ranks):
            if rank.enters is not None:
                if len(self.entered[rank.at]) == len(self.ranks):
                    events.append(("leave_collective", number, 0))
                elif rank.wave.state.phase is WavePhase.STARTING and self._unheard(number):
                    events.append(("repeat", number, 0))
                continue
            if not rank.wave.is_idle(has_work=rank.has_work):
                events.append(("act", number, 0))
            if rank.arrivals and not rank.wave.has_left:
                events.append(("arrive", number, 0))
            if rank.orders:
                events.append(("order", number, 0))
        for to, wave in self.messages:
            # A message lies in the socket of a rank that waits in a collective.
            if self.ranks[to].enters is None:
                events.append(("hear", to, wave))
                if self.doubles:
                    events.append(("hear_double", to, wave))
            if self.losses:
                events.append(("lose", to, wave))
        return events

    def happen(self, event: Event) -> None:
        kind, number, wave = event
        rank = self.ranks[number]
        if kind == "arrive":
            rank.work, rank.arrivals = (*rank.work, rank.arrivals[0]), rank.arrivals[1:]
        elif kind == "order":
            getattr(rank.wave, rank.orders[0])()
            rank.orders = rank.orders[1:]
        elif kind == "act":
            self._act(number, rank)
        elif kind == "leave_collective":
            self._leave_collective(rank)
        elif kind == "repeat":
            for to in self._unheard(number):
                self.messages[to, rank.wave.number] += 1
        elif kind == "hear_double":
            self.doubles -= 1
            rank.wave.receive_start(wave)
        else:
            self.messages[number, wave] -= 1
            self.messages = +self.messages
            if kind == "lose":
                self.losses -= 1
            else:
                rank.wave.receive_start(wave)

    def _unheard(self, number: int) -> list[int]:
        """Ranks that are to hear of this one's wave; to tell another, or one that a message is on the way to, again
        would change nothing, and lead back to where it began."""
        wave = self.ranks[number].wave.number
        return [to for to, rank in enumerate(self.ranks) if not (rank.is_in(wave) or self.messages[to, wave])]

    def _act(self, number: int, rank: Rank) -> None:
        action = rank.wave.next_action(has_work=rank.has_work)
        if action is Action.BEGIN:
            for to in range(len(self.ranks)):
                if to != number:
                    self.messages[to, rank.wave.number] += 1
            return
        flags = rank.wave.flags(has_work=rank.has_work) if action is Action.MEET else None
        rank.at += 1
        rank.enters = (action, flags)
        here = self.entered.setdefault(rank.at, {})
        here[number] = rank.enters
        if any((other is Action.MEET) != (action is Action.MEET) for other, _ in here.values()):
            raise RankAloneError(f"collective {rank.at}: {here}")
        if len(here) == len(self.ranks):
            self._complete(here)

    def _complete(self, here: dict[int, tuple[Action, Flags | None]]) -> None:
        all_flags = [flags for _, flags in here.values() if flags is not None]
        if all_flags:
            self.last_sums = Flags(*map(sum, zip(*all_flags, strict=True)))
            return
        assert self.last_sums is not None
        assert self.last_sums.has_work, "a forward though nobody had work"
        assert not self.last_sums.is_paused, "a forward though a rank was paused"
        self.num_forwards += 1

    def _leave_collective(self, rank: Rank) -> None:
        assert rank.enters is not None
        action, flags = rank.enters
        rank.enters = None
        if flags is None:
            rank.wave.count_step()
            if action is Action.STEP:
                rank.work = tuple(left - 1 for left in rank.work if left > 1)
        else:
            messages = [message for _, message in self.entered[rank.at].values() if message is not None]
            rank.wave.end_meeting(Flags(*map(sum, zip(*messages, strict=True))))
        if all(other.at > rank.at or (other.at == rank.at and other.enters is None) for other in self.ranks):
            del self.entered[rank.at]

    def check_end(self) -> None:
        """Nothing more can happen: that must be since all is done, and not since ranks wait for each other."""
        states = [rank.wave.state for rank in self.ranks]
        assert all(rank.enters is None for rank in self.ranks), f"ranks wait for ever: {self.ranks}"
        assert len({rank.at for rank in self.ranks}) == 1, "ranks have made different numbers of collectives"
        assert len({state.wave for state in states}) == 1, f"waves did not end together: {states}"
        if any(state.phase is WavePhase.LEFT for state in states):
            assert all(state.phase is WavePhase.LEFT for state in states), states
            return
        if all(state.phase is WavePhase.IDLE for state in states):
            assert not any(rank.work for rank in self.ranks), f"a request waits for ever: {self.ranks}"
