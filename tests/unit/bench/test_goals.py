"""Figures, ratios per round, and goals, from rows made by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.ops.lab.bench.engines.growth import GrowthRow, Size
from penstock.ops.lab.bench.engines.judge import Verdict
from penstock.ops.lab.bench.engines.report import engine_tables, goals_table
from penstock.ops.lab.bench.engines.roofline import Bandwidth
from penstock.ops.lab.bench.engines.row import EngineRow, SideRow
from penstock.ops.lab.bench.engines.sides import (
    ALONE,
    ALONE_DETERMINISTIC,
    ALONE_INT4,
    ALONE_INT8,
    SERVED,
    VLLM_OFFLINE,
)
from penstock.ops.lab.bench.goals import Goal, State, engine_goals, enqueue_goals, growth_goals
from penstock.ops.lab.bench.queue.enqueue import EnqueueRow, Pairing
from penstock.ops.lab.bench.result import Figures, PhaseResult, SideRun
from penstock.ops.lab.bench.workload import ALL_AT_ONCE, IDLE, ONE_AT_A_TIME

BANDWIDTH = Bandwidth(num_threads=2, one_thread_gb_per_s=18.0, all_threads_gb_per_s=40.0, loops="read")


def figures(tokens_per_s: float, idle_ttft_ms: float = 1.0) -> Figures:
    return Figures(
        tokens_per_s=tokens_per_s,
        ttft_p50_ms=1.0,
        ttft_p99_ms=2.0,
        itl_p50_ms=1.0,
        itl_p99_ms=2.0,
        single_ms_per_token=1.0,
        single_ttft_ms=5.0,
        idle_ttft_ms=idle_ttft_ms,
        ready_s=2.0,
        rss_bytes=1 << 30,
        peak_rss_bytes=1 << 30,
    )


def row(*sides: SideRow, model: str = "smol135") -> EngineRow:
    return EngineRow(
        model=model, dtype="bfloat16", num_requests=2, num_single=1, seed=0, decode_bytes=20_000_000, sides=list(sides)
    )


def side(name: str, *rates: float, wrong: str = "", missing: str = "", idle_ttft_ms: float = 1.0) -> SideRow:
    verdict = Verdict(precision="bfloat16")
    rounds = [figures(rate, idle_ttft_ms) for rate in rates]
    return SideRow(name=name, wrong=wrong, missing=missing, checked=verdict, timed=verdict, rounds=rounds)


def goals(of: EngineRow) -> dict[str, Goal]:
    return {goal.what: goal for goal in engine_goals(of)}


def printed(of: EngineRow) -> str:
    console = Console(file=io.StringIO(), width=300)
    for table in engine_tables(of, BANDWIDTH):
        console.print(table)
    console.print(goals_table(engine_goals(of)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_reported_ratio_is_the_median_of_the_rounds() -> None:
    measured = row(side(ALONE, 100, 300, 200), side(VLLM_OFFLINE, 100, 100, 100))
    assert measured.ratio(ALONE, VLLM_OFFLINE, "tokens_per_s") == 2.0
    assert measured.ratio(ALONE, SERVED, "tokens_per_s") is None


def test_goals_are_met_or_not_or_not_measured() -> None:
    results = goals(row(side(ALONE, 130), side(SERVED, 120, idle_ttft_ms=3.5), side(VLLM_OFFLINE, 100)))
    assert results["tokens/s, alone over vLLM offline"].state is State.MET
    assert results["tokens/s, through Redis over alone"].state is State.NOT_MET
    assert results["TTFT added by Redis at idle, p50, ms"].value == 2.5
    assert results["TTFT added by Redis at idle, p50, ms"].state is State.NOT_MET
    assert results["one request, ms/token, alone over llama.cpp"].state is State.NOT_MEASURED


def test_deterministic_and_prompts_have_goals() -> None:
    results = goals(row(side(ALONE, 100), side(ALONE_DETERMINISTIC, 94), side(VLLM_OFFLINE, 100)))
    assert results["tokens/s, alone and deterministic over alone"].state is State.NOT_MET
    assert results["prompt of 128 tokens, ms, alone over vLLM offline"].value == 1.0


def test_int8_weights_have_a_separate_goal_and_no_bandwidth_share() -> None:
    of_bytes = side(ALONE_INT8, 160)
    of_bytes.timed = Verdict(precision="int8")
    measured = row(side(ALONE, 130), of_bytes, side(VLLM_OFFLINE, 100))
    assert goals(measured)["tokens/s, alone with int8 over vLLM offline"].state is State.MET
    four = "one request, ms/token, alone with int4 over alone"
    assert goals(measured)[four].state is State.NOT_MEASURED
    assert goals(row(side(ALONE, 130), side(ALONE_INT4, 130)))[four].state is State.NOT_MET
    (line,) = (line for line in printed(measured).splitlines() if ALONE_INT8 in line and "1.00" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][-2:] == ["-", "-"]


def test_a_model_without_goals_has_only_those_of_all() -> None:
    assert not [what for what in goals(row(side(ALONE, 1), model="demo")) if "tokens/s" in what]


def test_wrong_or_missing_output_prints_no_speed() -> None:
    text = printed(
        row(side(ALONE, 1234), side(SERVED, wrong="token 3 of request 0"), side(VLLM_OFFLINE, missing="not installed"))
    )
    assert "token 3 of request 0" in text
    assert "not installed" in text
    assert "1,234" in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    first, *speeds = [cells for name, *cells in rows if name == SERVED]
    assert first == ["wrong", "token 3 of request 0"]
    assert len(speeds) == 2
    assert {cell for cells in speeds for cell in cells} == {"wrong", "-"}
    assert "50%" in next(line for line in text.splitlines() if ALONE in line and "20.0" in line)


def test_growth_is_flat_if_the_largest_batch_costs_no_more_than_the_cheapest() -> None:
    def growth(*costs: float) -> State:
        sizes = [
            Size(num_running=8**i, num_steps=1, scheduler_us_per_request=us, step_ms=1.0) for i, us in enumerate(costs)
        ]
        (goal,) = growth_goals(
            GrowthRow(
                model="tiny", sizes=sizes, num_queued=1, kib_per_queued=1, kib_per_running=1, tokens_per_running=1
            )
        )
        return goal.state

    assert growth(40.0, 8.0, 4.0, 4.4) is State.MET
    assert growth(40.0, 8.0, 4.0, 9.0) is State.NOT_MET


def test_a_rival_queue_that_is_not_installed_leaves_its_goal_open() -> None:
    def pairing(rival: str, ratio: float | None) -> Pairing:
        return Pairing(way="way", rival=rival, num_requests=1, per_s=1.0, ratio=ratio)

    rivals = [pairing("arq", None), pairing("arq", None), pairing("streaQ", 1.2), pairing("XADD", 0.4)]
    results = list(enqueue_goals(EnqueueRow(rounds=1, payload_bytes=1, pairings=rivals)))
    assert [goal.state for goal in results] == [State.NOT_MEASURED, State.MET, State.NOT_MET]


def test_figures_of_a_run() -> None:
    def phase(name: str, *times_s: list[float], sent_s: float = 0.0) -> PhaseResult:
        return PhaseResult(
            name=name,
            wall_s=2.0,
            output_token_ids=[[1] * len(times) for times in times_s],
            token_times_s=list(times_s),
            sent_s=[sent_s] * len(times_s),
        )

    phases = [
        # The second request's last two tokens came in one delta: they share the time since the one before.
        phase(ALL_AT_ONCE, [0.1, 0.2], [0.3, 0.5, 0.5]),
        phase(ONE_AT_A_TIME, [1.5, 1.6, 1.8], sent_s=1.0),
        phase(IDLE, [0.25], sent_s=0.125),
    ]
    run = Figures.from_run(SideRun(ready_s=1.0, rss_bytes=1, peak_rss_bytes=2, phases=phases))
    assert run.tokens_per_s == 2.5
    assert (run.ttft_p50_ms, run.ttft_p99_ms) == pytest.approx((100, 300))
    assert (run.itl_p50_ms, run.itl_p99_ms) == pytest.approx((100, 100))
    assert run.single_ms_per_token == pytest.approx(150)
    assert run.single_ttft_ms == pytest.approx(500)
    assert run.idle_ttft_ms == pytest.approx(125)
