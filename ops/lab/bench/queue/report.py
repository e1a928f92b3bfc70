"""The tables of the rows about the queue."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from rich.table import Table

from ..goals import MAX_EVENTS_SHARE, MAX_FLEET_P50_RATIO, MAX_FLEET_REDIS_RATIO, MIN_ENQUEUE_OVER_RIVAL
from ..result import figure_table
from .costs import CostsRow
from .enqueue import Cost, EnqueueRow
from .fairness import FairnessRow, Feel
from .figures import FiguresRow
from .fleet import FleetRow
from .idle import IdleRow
from .ledger import LedgerCostRow
from .scale import ScaleRow

GOAL_FULL_OVER_EMPTY = 2.0
GOAL_FLOODED_OVER_ALONE = 2.0
GOAL_CALLS_PER_S = 5.0
GOAL_WAKE_MS = 5.0


class QueueRows(msgspec.Struct, kw_only=True):
    """Results of the chosen rows."""

    enqueue: EnqueueRow | None = None
    scale: ScaleRow | None = None
    fairness: FairnessRow | None = None
    idle: IdleRow | None = None
    fleet: FleetRow | None = None
    costs: CostsRow | None = None
    figures: FiguresRow | None = None
    ledger: LedgerCostRow | None = None


def measured_rows(rows: QueueRows) -> list[str]:
    """Return the names of the measured rows, in the order of their tables."""
    return [name for name in rows.__struct_fields__ if getattr(rows, name) is not None]


def queue_table(name: str, rows: QueueRows) -> Table:
    """Return the table of a measured row."""
    return _TABLES[name](getattr(rows, name))


def _rates(row: EnqueueRow) -> Table:
    title = f"enqueue, requests/s, {row.payload_bytes} bytes each, nobody consuming"
    cpu = "CPU µs, caller + Redis"
    table = figure_table(title, "way", "requests/s", cpu, "rival", "requests/s", cpu, "ratio", "goal")
    for pairing, goal in zip(row.pairings, MIN_ENQUEUE_OVER_RIVAL, strict=True):
        is_measured = pairing.ratio is not None
        table.add_row(
            pairing.way,
            f"{pairing.per_s:,.0f}",
            _processor_us(pairing.cost),
            pairing.rival,
            f"{pairing.rival_per_s:,.0f}" if is_measured else "not installed",
            _processor_us(pairing.rival_cost),
            f"{pairing.ratio:.2f}" if is_measured else "-",
            f"≥ {goal:g}" if goal is not None else "-",
        )
    return table


def _processor_us(cost: Cost | None) -> str:
    return "-" if cost is None else f"{cost.client_us:.0f} + {cost.redis_us:.0f}"


def _scale(row: ScaleRow) -> Table:
    if row.skipped:
        table = figure_table("deep queue", "not measured")
        table.add_row(row.skipped)
        return table
    title = f"caller / server, ms: {row.num_requests:,} requests of {row.num_tenants:,} tenants wait, or none"
    table = figure_table(title, "operation", "none, p50", "deep, p50", "none, p99", "deep, p99", "p50 ratio")
    for cost in row.operations:
        table.add_row(
            cost.operation,
            f"{cost.empty_p50_ms:.2f} / {cost.empty_server_p50_us / 1000:.2f}",
            f"{cost.full_p50_ms:.2f} / {cost.full_server_p50_us / 1000:.2f}",
            f"{cost.empty_p99_ms:.2f} / {cost.empty_server_p99_us / 1000:.2f}",
            f"{cost.full_p99_ms:.2f} / {cost.full_server_p99_us / 1000:.2f}",
            f"{cost.ratio:.2f} / {cost.server_ratio:.2f}",
        )
    table.caption = (
        f"filled at {row.fill_per_s:,.0f} requests/s; a queued request takes {row.redis_bytes_per_request:,.0f} bytes "
        f"of Redis's memory, of which {row.payload_bytes} are its payload; goal of ratios ≤ {GOAL_FULL_OVER_EMPTY:g}"
    )
    return table


def _fairness(row: FairnessRow) -> Table:
    table = figure_table(
        f"a tenant beside one that floods {row.flood_factor}:1, ms, p50 / p99",
        "beside it",
        "TTFT",
        "until claimed",
        "claim to token",
        "between tokens",
        "flood started, 1/s",
    )
    for name, feel in (("nobody", row.alone), ("the flood", row.flooded), ("a flood of its own", row.one_tenant)):
        table.add_row(name, *_feel(feel), f"{feel.num_other_started / feel.wall_s:,.0f}")
    table.caption = (
        f"TTFT beside the flood over alone: p50 {row.p50_ratio:.2f}, p99 {row.p99_ratio:.2f} "
        f"(rounds {min(row.p99_ratios):.2f} to {max(row.p99_ratios):.2f}; goal ≤ {GOAL_FLOODED_OVER_ALONE:g})"
    )
    return table


def _feel(feel: Feel) -> list[str]:
    return [
        f"{feel.ttft_p50_ms:,.0f} / {feel.ttft_p99_ms:,.0f}",
        f"{feel.to_claim_p50_ms:,.0f} / {feel.to_claim_p99_ms:,.0f}",
        f"{feel.claim_to_token_p50_ms:,.0f} / {feel.claim_to_token_p99_ms:,.0f}",
        f"{feel.between_tokens_p50_ms:,.1f} / {feel.between_tokens_p99_ms:,.1f}",
    ]


def _idle(row: IdleRow) -> Table:
    title = "an idle worker start, one engine"
    table = figure_table(title, "calls/s", "goal", "wake p50 / p99 / max, ms", "goal of p50")
    table.add_row(
        f"{row.calls_per_s:.1f}",
        f"< {GOAL_CALLS_PER_S:g}",
        f"{row.wake_p50_ms:.2f} / {row.wake_p99_ms:.2f} / {row.wake_max_ms:.2f}",
        f"< {GOAL_WAKE_MS:g}",
    )
    table.caption = f"calls in {row.watch_s:g} s: " + ", ".join(f"{name} {count}" for name, count in row.calls.items())
    return table


def _fleet(row: FleetRow) -> Table:
    title = f"a fleet of engines, {row.requests_per_s:g} requests/s one by one"
    table = figure_table(
        title,
        "engines",
        "claims a request",
        "Redis CPU a request, ms",
        "enqueue to claim p50 / p99, ms",
        "idle, % of a core",
        "all dead: queued again, s",
        "longest script, ms",
    )
    for size in row.sizes:
        table.add_row(
            f"{size.num_engines:,}",
            f"{size.claims_per_request:.1f}",
            f"{size.redis_ms_per_request:.2f}",
            f"{size.to_claim_p50_ms:.2f} / {size.to_claim_p99_ms:.2f}",
            f"{100 * size.idle_cpu_share:.1f}",
            f"{size.storm_s:.2f}",
            f"{size.storm_longest_ms:.1f}",
        )
    table.caption = (
        f"most over one: enqueue to claim p50 {row.p50_ratio:.2f} (goal ≤ {MAX_FLEET_P50_RATIO:g}), Redis CPU a "
        f"request {row.redis_ratio:.2f} (goal ≤ {MAX_FLEET_REDIS_RATIO:g}); dead engines held "
        f"{row.claims_per_dead_engine} requests each"
    )
    return table


def _costs(row: CostsRow) -> Table:
    table = figure_table("what Redis spends", "of", "CPU, µs", "memory, bytes")
    table.add_row("a request: enqueued, claimed, ended", f"{row.us_per_request:.0f}", "")
    for num_tokens, us in row.us_per_delta.items():
        table.add_row(f"a delta of {num_tokens} tokens", f"{us:.1f}", "")
    for what, size in (("waits", row.bytes_waiting), ("runs", row.bytes_running), ("has ended", row.bytes_ended)):
        table.add_row(f"a request that {what}", "", f"{size:,.0f}")
    table.caption = "calls of 64 each, a prompt of 300 bytes, 200 tokens of output in 50 deltas, one client listens"
    return table


def _figures(row: FiguresRow) -> Table:
    table = figure_table("what it costs to know what happened", "of", "without events", "with events")
    for cost in row.events:
        what = f"a request: enqueued, claimed, ended, in calls of {cost.at_once}, CPU µs"
        table.add_row(what, f"{cost.us_off:.1f}", f"{cost.us_on:.1f} ({100 * cost.share:+.1f} %)")
    table.add_row(
        "a request that has ended, bytes", f"{row.bytes_per_ended_off:,.0f}", f"{row.bytes_per_ended_on:,.0f}"
    )
    table.add_row(f"the stream of {row.events_kept:,} events, bytes", "", f"{row.events_bytes:,.0f}")
    table.caption = (
        f"goal of what events add: ≤ {100 * MAX_EVENTS_SHARE:g} %, medians of pairs; nothing per token; series take "
        f"{row.series_day_bytes / 2**20:.1f} MiB a model and day where each minute has "
        f"every bucket and 100 tenants, {row.series_all_bytes / 2**20:.1f} MiB in all; an engine's addition, every "
        f"10 s, {row.us_per_addition:.0f} µs"
    )
    return table


def _ledger(row: LedgerCostRow) -> Table:
    table = figure_table("what it costs to count usage", "of", "without", "with the ledger", "with two budgets too")
    for cost in row.costs:
        table.add_row(
            f"a request: enqueued, claimed, ended, in calls of {cost.at_once}, CPU µs",
            f"{cost.us_none:.1f}",
            f"{cost.us_ledger:.1f} ({100 * cost.share:+.1f} %)",
            f"{cost.us_budgets:.1f} ({100 * cost.budgets_share:+.1f} %)",
        )
    table.caption = "goal of the ledger: ≤ 3 %; the least of 20 rounds of each, in turn; nothing per token"
    return table


_TABLES: dict[str, Callable[..., Table]] = {
    "enqueue": _rates,
    "scale": _scale,
    "fairness": _fairness,
    "idle": _idle,
    "fleet": _fleet,
    "costs": _costs,
    "figures": _figures,
    "ledger": _ledger,
}
