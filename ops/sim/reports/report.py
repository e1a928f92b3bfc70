"""Computation of figures and checks from the measurements of a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ....shared.swap.rule import Reason, repaid_per_s
from ....shared.values.names import partition_name
from ...statistics import percentile
from ..devices import SwapLog, longest_neglect_s
from ..measures import Loss, Measures, Note
from ..scenario import Scenario, Shard, SwapRule, Tenants
from ..simulation import Simulated
from .figures import (
    Check,
    ClaimFigures,
    Figures,
    GroupFigures,
    JainFigure,
    OutageFigures,
    PartitionFigures,
    RecoveryFigures,
    Report,
    Series,
    SessionFigures,
    SwapFigures,
)

# Points per series in the report; a plot cannot show more.
MAX_POINTS = 600


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
        partitions=_partition_figures(scenario, measures),
        sessions=[_session_figures(group, measures) for group in scenario.tenants if group.turns > 1],
        num_warm=simulated.num_warm,
        num_warm_kept=simulated.num_warm_kept,
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
        swaps=[_swap_figures(swap_log, scenario.duration_s) for swap_log in simulated.swap_logs],
        checks=[*_checks(scenario, simulated), *_swap_checks(simulated)],
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
    """Return the figures of each group, in order."""
    notes_of: dict[str, list[Note]] = {group.name: [] for group in groups}
    for note in measures.notes.values():
        notes_of[note.group.name].append(note)
    return [_figures_of_group(group, notes_of[group.name], measures.num_refused[group.name]) for group in groups]


def _figures_of_group(group: Tenants, notes: list[Note], num_refused: int) -> GroupFigures:
    waits = _waits(notes)
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


def _partition_figures(scenario: Scenario, measures: Measures) -> list[PartitionFigures]:
    split = [name for one in scenario.partitions if one.number > 1 for name in scenario.queues_of(one.model)]
    notes_of: dict[str, list[Note]] = {name: [] for name in split}
    for note in measures.notes.values():
        name = partition_name(note.group.model, note.partition)
        if name in notes_of:
            notes_of[name].append(note)
    return [
        PartitionFigures(
            name=name,
            num_tenants=len({note.tenant for note in notes}),
            num_requests=len(notes),
            num_ended=sum(note.ended_s is not None for note in notes),
            wait_p50_s=_percentile(_waits(notes), 0.5),
            wait_p99_s=_percentile(_waits(notes), 0.99),
        )
        for name, notes in notes_of.items()
    ]


def _session_figures(group: Tenants, measures: Measures) -> SessionFigures:
    later = [
        note
        for note in measures.notes.values()
        if note.group.name == group.name and note.turn > 0 and note.first_token_s is not None
    ]
    num_findable = sum(note.num_findable for note in later)
    ttfts = [(note.first_token_s or 0.0) - note.arrived_s for note in later]
    return SessionFigures(
        name=group.name,
        num_turns=len(later),
        found_share=round(sum(note.num_found for note in later) / num_findable, 4) if later else None,
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
    )


def _waits(notes: list[Note]) -> list[float]:
    return [note.claimed_s - note.arrived_s for note in notes if note.claimed_s is not None]


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
    own = [note for note in came if partition_name(note.group.model, note.partition) in shard.models]
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


def _swap_figures(swap_log: SwapLog, duration_s: float) -> SwapFigures:
    has_bound = swap_log.kind.swaps.rule is SwapRule.STANDING
    return SwapFigures(
        models=swap_log.kind.models,
        rule=swap_log.kind.swaps.rule,
        num_swaps=len(swap_log.swaps),
        share=round(swap_log.swap_s / duration_s, 4),
        num_by_reason=dict(sorted(Counter(swap.reason.value for swap in swap_log.swaps).items())),
        waits={
            band: (round(wait.wait_s, 3), round(swap_log.bound_s(band), 3) if has_bound else None)
            for band, wait in sorted(swap_log.longest_waits().items())
        },
    )


def _swap_checks(simulated: Simulated) -> list[Check]:
    """Return the checks of engines whose rule has bounds."""
    logs = [swap_log for swap_log in simulated.swap_logs if swap_log.kind.swaps.rule is SwapRule.STANDING]
    waits = [(wait, swap_log.bound_s(band)) for swap_log in logs for band, wait in swap_log.longest_waits().items()]
    if not waits:
        return []
    wait, bound_s = max(waits, key=lambda pair: pair[0].wait_s / pair[1])
    neglect_s, most_s = simulated.longest_neglect_s, longest_neglect_s(logs[0].kind, simulated.scenario.queue.bands)
    return [
        Check(
            name="a free device wakes a model within a lease and its patience",
            holds=neglect_s <= most_s,
            seen=f"after {neglect_s:.2f} s at most, of {most_s:.2f} s",
        ),
        Check(
            name="no model waits beyond the bound",
            holds=wait.wait_s <= bound_s,
            seen=f"{wait.model} waited {wait.wait_s:.1f} s at most, of {bound_s:.1f} s",
        ),
        *(_share_check(swap_log, simulated.scenario.duration_s) for swap_log in logs if swap_log.swaps),
    ]


def _share_check(swap_log: SwapLog, duration_s: float) -> Check:
    """Return the check of the cost of swaps for late models, which only repaid debt allows."""
    cost_s = sum(swap.cost_s for swap in swap_log.swaps if swap.reason is Reason.LATE)
    dearest = max(swap.cost_s for swap in swap_log.swaps)
    most_s = repaid_per_s(swap_log.kind.swaps.options) * (duration_s - swap_log.swap_s) + dearest
    return Check(
        name="swaps for late models keep to max_share",
        holds=cost_s <= most_s,
        seen=f"they cost {cost_s:.1f} s, of {most_s:.1f} s",
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
    value = percentile(values, share)
    return None if math.isnan(value) else round(value, 4)
