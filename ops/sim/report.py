"""From what a simulation has noted to figures and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ..latency import percentile
from .measures import Loss, Measures, Note
from .scenario import Scenario, Shard, Tenants
from .simulation import Simulated

# Of the series that go into the report; more would be no more than a line in a plot can show.
MAX_POINTS = 600


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One group of tenants. Times in seconds of virtual time; None where nothing was seen.

    ``wait`` is from arrival to the first claim, ``ttft`` to the first token, ``total`` to the end.
    """

    name: str
    num_tenants: int
    num_requests: int
    num_ended: int
    num_refused: int
    wait_p50_s: float | None
    wait_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    total_p50_s: float | None
    total_p99_s: float | None


class JainFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of the ten seconds up to ``at_s``, over the tenants that waited all that time; None for fewer than two."""

    at_s: float
    index: float | None
    num_tenants: int


class ClaimFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Claims by cause: "start", "wake", "end" (of a request), "retry", "idle"."""

    num_claims: dict[str, int]
    num_wasted: dict[str, int]
    claims_per_request: float


class RecoveryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A death. ``claimed`` and ``next_token`` are seconds from it, of the requests that were under way there."""

    at_s: float
    num_engines: int
    num_requests: int
    num_gone_on: int
    claimed_p50_s: float | None
    claimed_max_s: float | None
    next_token_p50_s: float | None
    next_token_max_s: float | None


class OutageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A shard was away. Its share is of all requests that came meanwhile; times are from its return to their claim and
    first token."""

    models: list[str]
    at_s: float
    for_s: float
    num_requests: int
    share: float
    claimed_p50_s: float | None
    claimed_max_s: float | None
    first_token_p50_s: float | None
    first_token_max_s: float | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet over time; each list has one value per entry of ``at_s``."""

    at_s: list[float]
    num_waiting: list[int]
    num_running: list[int]
    num_engines: list[int]
    num_wanted: list[int]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold, whether it does, and what was seen."""

    name: str
    holds: bool
    seen: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from scenario and seed alone."""

    duration_s: float
    seed: int
    groups: list[GroupFigures]
    jain: list[JainFigure]
    claims: ClaimFigures
    recoveries: list[RecoveryFigures]
    outages: list[OutageFigures]
    checks: list[Check]
    script_calls: dict[str, int]
    series: Series


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures, and the real time that they took."""

    figures: Figures
    wall_s: float

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.figures.checks)


def make_report(simulated: Simulated) -> Report:
    """Return all figures of a simulation."""
    scenario, measures = simulated.scenario, simulated.measures
    num_first_claims = sum(note.claimed_s is not None for note in measures.notes.values())
    step = max(1, math.ceil(len(measures.samples) / MAX_POINTS))
    samples = measures.samples[::step]
    figures = Figures(
        duration_s=scenario.duration_s,
        seed=scenario.seed,
        groups=group_figures(scenario.tenants, measures),
        jain=[
            JainFigure(at_s=at_s, index=None if math.isnan(index) else round(index, 4), num_tenants=number)
            for at_s, index, number in measures.jain
        ],
        claims=ClaimFigures(
            num_claims=dict(sorted(measures.num_claims.items())),
            num_wasted=dict(sorted(measures.num_wasted.items())),
            claims_per_request=round(measures.num_claims.total() / max(1, num_first_claims), 3),
        ),
        recoveries=[_recovery_figures(loss) for loss in measures.losses],
        outages=[
            _outage_figures(shard, shard.away_at_s, measures)
            for shard in scenario.shards
            if shard.away_at_s is not None
        ],
        checks=_checks(scenario, simulated),
        script_calls=simulated.num_calls,
        series=Series(
            at_s=[sample.at_s for sample in samples],
            num_waiting=[sample.num_waiting for sample in samples],
            num_running=[sample.num_running for sample in samples],
            num_engines=[sample.num_engines for sample in samples],
            num_wanted=[sample.num_wanted for sample in samples],
        ),
    )
    return Report(figures=figures, wall_s=round(simulated.wall_s, 2))


def group_figures(groups: list[Tenants], measures: Measures) -> list[GroupFigures]:
    """The figures of each group, in order."""
    notes_of: dict[str, list[Note]] = {group.name: [] for group in groups}
    for note in measures.notes.values():
        notes_of[note.group.name].append(note)
    return [_figures_of_group(group, notes_of[group.name], measures.num_refused[group.name]) for group in groups]


def _figures_of_group(group: Tenants, notes: list[Note], num_refused: int) -> GroupFigures:
    waits = [note.claimed_s - note.arrived_s for note in notes if note.claimed_s is not None]
    ttfts = [note.first_token_s - note.arrived_s for note in notes if note.first_token_s is not None]
    totals = [note.ended_s - note.arrived_s for note in notes if note.ended_s is not None]
    return GroupFigures(
        name=group.name,
        num_tenants=group.number,
        num_requests=len(notes),
        num_ended=len(totals),
        num_refused=num_refused,
        wait_p50_s=_percentile(waits, 0.5),
        wait_p99_s=_percentile(waits, 0.99),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
        total_p50_s=_percentile(totals, 0.5),
        total_p99_s=_percentile(totals, 0.99),
    )


def _recovery_figures(loss: Loss) -> RecoveryFigures:
    return RecoveryFigures(
        at_s=loss.at_s,
        num_engines=loss.num_engines,
        num_requests=loss.num_requests,
        num_gone_on=len(loss.next_token_after_s),
        claimed_p50_s=_percentile(loss.claimed_after_s, 0.5),
        claimed_max_s=_percentile(loss.claimed_after_s, 1.0),
        next_token_p50_s=_percentile(loss.next_token_after_s, 0.5),
        next_token_max_s=_percentile(loss.next_token_after_s, 1.0),
    )


def _outage_figures(shard: Shard, at_s: float, measures: Measures) -> OutageFigures:
    back_s = at_s + shard.away_for_s
    came = [note for note in measures.notes.values() if at_s <= note.arrived_s < back_s]
    own = [note for note in came if note.group.model in shard.models]
    claimed = [note.claimed_s - back_s for note in own if note.claimed_s is not None]
    first_tokens = [note.first_token_s - back_s for note in own if note.first_token_s is not None]
    return OutageFigures(
        models=shard.models,
        at_s=at_s,
        for_s=shard.away_for_s,
        num_requests=len(own),
        share=round(len(own) / max(1, len(came)), 4),
        claimed_p50_s=_percentile(claimed, 0.5),
        claimed_max_s=_percentile(claimed, 1.0),
        first_token_p50_s=_percentile(first_tokens, 0.5),
        first_token_max_s=_percentile(first_tokens, 1.0),
    )


def _checks(scenario: Scenario, simulated: Simulated) -> list[Check]:
    measures, num_known = simulated.measures, simulated.num_known
    num_open = sum(note.ended_s is None for note in measures.notes.values())
    limit_s = scenario.checks.max_wait_with_room_s
    return [
        Check(
            name="every request has ended, waits or runs",
            holds=num_open == num_known,
            seen=f"{num_open} have not ended, of which Redis knows {num_known}",
        ),
        Check(
            name="no engine that lives is refused",
            holds=measures.num_stale == 0,
            seen=f"{measures.num_stale} writes were",
        ),
        Check(
            name=f"none waits longer than {limit_s:g} s while one engine has room all the time",
            holds=measures.longest_with_room_s <= limit_s,
            seen=f"{measures.longest_with_room_s:.2f} s at most",
        ),
    ]


def _percentile(values: Iterable[float], share: float) -> float | None:
    found = percentile(values, share)
    return None if math.isnan(found) else round(found, 4)
