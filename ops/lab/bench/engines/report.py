"""The tables of the rows about engines. A side that is wrong has no figure in any of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from rich.markup import escape
from rich.table import Table

from ..goals import Goal, State
from ..queue.follow import FollowRow
from ..result import describe_versions, figure_table, median_ratio
from .gateway_row import GatewayRow
from .growth import GrowthRow
from .pooling import PoolingRow
from .roofline import Bandwidth
from .row import EngineRow, SideRow
from .sessions import SessionsRow
from .sides import ALONE, VLLM_HTTP

_MIB = 2**20
_MAX_WORDS = 300
QUALITY = "KL to float32, nats"


def engine_tables(row: EngineRow, bandwidth: Bandwidth | None, ours: str = ALONE) -> Iterator[Table]:
    """Yield all tables of one model, with ratios of the side ``ours`` over the others."""
    yield _outputs(row)
    yield _all_at_once(row, ours)
    yield _one_at_a_time(row, bandwidth, ours)


def _outputs(row: EngineRow) -> Table:
    table = figure_table(
        f"{row.model}: greedy tokens against transformers in float32", "side", "float32", f"as timed, {row.dtype}"
    )
    for side in row.sides:
        if side.missing:
            table.add_row(side.name, side.missing, "-")
        elif side.wrong:
            table.add_row(side.name, "wrong", escape(side.wrong[:_MAX_WORDS]))
        else:
            table.add_row(side.name, *_verdicts(side))
    table.caption = "; ".join(describe_versions(side.name, side.versions) for side in row.sides if side.versions)
    return table


def _verdicts(side: SideRow) -> list[str]:
    checked, timed = side.checked, side.timed
    assert checked is not None
    assert timed is not None
    return [
        f"{checked.num_identical} of {checked.num_requests} identical, largest gap {checked.largest_gap:.1g}",
        f"{timed.num_requests} outputs, largest gap {timed.largest_gap:.2g}",
    ]


def _all_at_once(row: EngineRow, ours: str) -> Table:
    table = figure_table(
        f"{row.model}, {row.dtype}: {row.num_requests} requests at once",
        "side",
        "tokens/s",
        _over(ours),
        QUALITY,
        "TTFT p50 / p99, ms",
        "ITL p50 / p99, ms",
        "ready, s",
        "RSS / highest, MiB",
    )
    for side in row.sides:
        ratio = row.ratio(ours, side.name, "tokens_per_s")
        table.add_row(
            side.name,
            *_cells(side, "{:,.0f}", "tokens_per_s"),
            "-" if ratio is None else f"{ratio:.2f}",
            _quality(side),
            *_cells(side, "{:,.1f} / {:,.1f}", "ttft_p50_ms", "ttft_p99_ms"),
            *_cells(side, "{:,.1f} / {:,.1f}", "itl_p50_ms", "itl_p99_ms"),
            *_cells(side, "{:,.1f}", "ready_s"),
            *_cells(side, "{:,.0f} / {:,.0f}", "rss_bytes", "peak_rss_bytes", scale=1 / _MIB),
        )
    return table


def _quality(side: SideRow) -> str:
    """Return the divergence of a quantised side from float32; its speed is never printed without."""
    if not side.is_quantized:
        return "-"
    if side.divergence is None:
        return "not measured"
    return f"{side.divergence.kl:.3f}, {side.divergence.model}"


def _over(ours: str) -> str:
    return f"{'engine alone' if ours == ALONE else ours} over it"


def _one_at_a_time(row: EngineRow, bandwidth: Bandwidth | None, ours: str) -> Table:
    table = figure_table(
        f"{row.model}, {row.dtype}: one request at a time",
        "side",
        "ms/token",
        _over(ours),
        QUALITY,
        "TTFT, 128 tokens, ms",
        "TTFT, 8 tokens, ms",
        "GB/s read",
        "of the bandwidth",
    )
    for side in row.sides:
        ratio = row.ratio(ours, side.name, "single_ms_per_token")
        ms_per_token = side.median("single_ms_per_token")
        reads_all = side.timed is not None and side.timed.precision == row.dtype
        read = row.decode_bytes / ms_per_token / 1e6 if ms_per_token and reads_all else None
        share = None if read is None or bandwidth is None else read / bandwidth.best_gb_per_s
        table.add_row(
            side.name,
            *_cells(side, "{:,.2f}", "single_ms_per_token"),
            "-" if ratio is None else f"{ratio:.2f}",
            _quality(side),
            *_cells(side, "{:,.1f}", "single_ttft_ms"),
            *_cells(side, "{:,.2f}", "idle_ttft_ms"),
            "-" if read is None else f"{read:.1f}",
            "-" if share is None else f"{share:.0%}",
        )
    if bandwidth is not None:
        table.caption = (
            f"a step reads {row.decode_bytes / 1e6:,.1f} MB, weights, keys and values; memory gives "
            f"{bandwidth.one_thread_gb_per_s:.1f} GB/s to one thread, {bandwidth.all_threads_gb_per_s:.1f} to "
            f"{bandwidth.num_threads} (torch: {bandwidth.loops})"
        )
    return table


def growth_table(row: GrowthRow) -> Table:
    """Return the table of the cost of more requests."""
    title = f"growth, {row.model}, engine alone"
    table = figure_table(title, "running requests", "scheduler, µs per request", "step, ms")
    for size in row.sizes:
        table.add_row(f"{size.num_running:,}", f"{size.scheduler_us_per_request:.1f}", f"{size.step_ms:.2f}")
    table.caption = (
        f"memory: {row.kib_per_queued:.1f} KiB for a request that waits in the engine, {row.kib_per_running:.0f} for "
        f"one that runs, with keys and values of {row.tokens_per_running} tokens"
    )
    return table


def pooling_table(row: PoolingRow) -> Table:
    """Return the table of embedded texts, compared with transformers."""
    table = figure_table(f"{row.model}: {row.num_texts:,} texts embedded, float32", "side", "texts/s", "ours over it")
    sides = {
        "engine alone": row.alone,
        "through Redis": row.through_redis,
        "transformers, in order of arrival": row.arrival,
        "transformers, sorted": row.sorted,
    }
    for name, rates in sides.items():
        table.add_row(name, f"{statistics.median(rates):,.0f}", f"{median_ratio(row.through_redis, rates):.2f}")
    table.caption = f"least cosine to transformers: {row.min_cosine:.8f}"
    return table


def sessions_table(row: SessionsRow) -> Table:
    """Return the table of conversations that return to their engine, compared with any engine."""
    title = (
        f"{row.model}: sessions of {row.num_turns} turns on {row.num_engines} engines of {row.max_num_seqs} sequences"
    )
    table = figure_table(
        title, "sessions", "tokens found, any engine", "its own", "TTFT, p50 / p99, any, ms", "its own", "ratio", "Jain"
    )
    for load in row.loads:
        table.add_row(
            f"{load.num_sessions}",
            *(f"{side.hit_share:.3f}" for side in (load.plain, load.warm)),
            *(f"{side.ttft_p50_ms:,.0f} / {side.ttft_p99_ms:,.0f}" for side in (load.plain, load.warm)),
            f"{load.ttft_p50_ratio:.2f} / {load.ttft_p99_ratio:.2f}",
            f"{load.plain.jain:.3f} / {load.warm.jain:.3f}",
        )
    shares = ", ".join(f"{load.kept_share:.1%} of {load.num_sessions} sessions" for load in row.loads)
    table.caption = (
        f"of the tokens computed for the turn before, those found; warm turns that ran on their engine: {shares}; "
        f"medians of {row.rounds} rounds"
    )
    return table


def follow_table(row: FollowRow) -> Table:
    """Return the table of one client's throughput."""
    table = figure_table(
        f"one client follows {row.num_streams:,} streams",
        "deltas",
        "deltas/s",
        "per second of the client's CPU time",
        "appended/s, nobody listening",
    )
    figures = (row.num_deltas, row.deltas_per_s, row.deltas_per_client_cpu_s, row.appended_per_s_unheard)
    table.add_row(*(f"{figure:,.0f}" for figure in figures))
    return table


def gateway_table(row: GatewayRow) -> Table:
    """Return the table of the client's streams, those over HTTP, and the rival's."""
    table = figure_table(
        f"{row.model}: {row.num_streams} streams, medians of the rounds",
        "way",
        "tokens/s",
        "TTFT p50, ms",
        "TTFT of one alone, p50, ms",
        "CPU of the load, µs a token",
        "of the gateway",
    )
    ways = [
        ("client", row.client, []),
        ("gateway", row.gateway, row.gateway_cpu_us_per_token),
        ("gateway, 2 workers", row.two, row.two_cpu_us_per_token),
        (VLLM_HTTP, row.vllm, []),
    ]
    for name, way, of_gateway in ways:
        columns = [way.tokens_per_s, way.ttft_ms, way.idle_ttft_ms, way.load_cpu_us_per_token, of_gateway]
        table.add_row(name, *(f"{statistics.median(figures):,.1f}" if figures else "-" for figures in columns))
    caption = (
        f"gateway over client {row.ratio:.2f}; two workers over one {row.two_over_one:.2f}; "
        f"TTFT added to one alone {row.added_ttft_ms:.2f} ms"
    )
    table.caption = f"{caption}; {VLLM_HTTP} {row.vllm_missing}" if row.vllm_missing else caption
    return table


def goals_table(goals: Iterable[Goal]) -> Table:
    """Return the table of all goals of the chosen rows."""
    table = figure_table("goals", "model", "what", "goal", "measured", "state")
    for goal in goals:
        value = "-" if goal.value is None else f"{goal.value:,.3g}" if goal.value < 1000 else f"{goal.value:,.0f}"
        style = {State.MET: "green", State.NOT_MET: "red", State.NOT_MEASURED: ""}[goal.state]
        table.add_row(goal.model, goal.what, goal.limit, value, goal.state.value, style=style)
    return table


def _cells(side: SideRow, form: str, *figures: str, scale: float = 1.0) -> list[str]:
    """Return one cell with the medians of ``figures``, or with the reason why none exist."""
    if not side.rounds:
        return ["wrong" if side.wrong else side.missing or "-"]
    medians = [side.median(figure) for figure in figures]
    return [form.format(*(median * scale for median in medians if median is not None)).replace("nan", "-")]
