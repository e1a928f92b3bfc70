"""Models that share an engine, in virtual time."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
import pytest

from penstock.ops.cli import main
from penstock.ops.sim.measures import Note
from penstock.ops.sim.reports.figures import Figures
from penstock.ops.sim.reports.report import make_report
from penstock.ops.sim.reports.rules import with_rule
from penstock.ops.sim.scenario import Engines, Scenario, Speed, SwapRule, Swaps, Tenants
from penstock.ops.sim.shapes import Constant, Fixed
from penstock.ops.sim.simulation import Simulated, simulate
from penstock.ops.sim.world import Partition
from penstock.shared.queue.stats import ModelState
from penstock.shared.swap.rule import Reason
from penstock.shared.swap.views import SwapOptions

ENGINES = Engines(
    number=1,
    models=["hot", "cold"],
    max_num_seqs=8,
    speed=Speed(fixed_ms=20, ms_per_seq=1, ms_per_prompt_token=0.1),
    swaps=Swaps(sleep_s=0.2, wake_s=0.3, options=SwapOptions(max_wait_s={"interactive": 10.0})),
)
# More than the engine serves: eight requests of 40 tokens take 1.1 s.
HOT = Tenants(
    name="hot",
    model="hot",
    band="interactive",
    arrivals=Constant(per_s=9),
    prompt=Fixed(tokens=100),
    output=Fixed(tokens=40),
)
COLD = Tenants(name="cold", model="cold", band="interactive", arrivals=Constant(per_s=0.3), output=Fixed(tokens=10))
SCENARIO = Scenario(duration_s=45.0, engines=[ENGINES], tenants=[HOT, COLD], seed=3)


def run(url: str, namespace: str, scenario: Scenario) -> tuple[Simulated, Figures]:
    simulated = simulate(url, scenario, namespace)
    report = make_report(simulated)
    assert report.holds, report.figures.checks
    return simulated, report.figures


def served(figures: Figures) -> dict[str, float]:
    return {group.name: group.num_ended / group.num_requests for group in figures.groups}


def test_the_rule_serves_the_cold_model_within_its_bound_and_share(redis_url: str, namespace: str) -> None:
    simulated, figures = run(redis_url, namespace, SCENARIO)
    names = [check.name for check in figures.checks]
    assert names[-2:] == ["no model waits beyond the bound", "swaps for late models keep to max_share"]
    (swaps,) = figures.swaps
    assert served(figures)["cold"] > 0.7
    assert 0.05 < swaps.share < 0.5
    wait_s, bound_s = swaps.waits["interactive"]
    assert bound_s is not None
    assert 0 < wait_s <= bound_s
    assert simulated.measures.num_recomputed > 0
    assert {swap.reason for swap in simulated.swap_logs[0].swaps} >= {Reason.LATE, Reason.EMPTY}


def test_two_overloaded_models_swap_as_often_as_the_share_allows(redis_url: str, namespace: str) -> None:
    other = msgspec.structs.replace(HOT, name="cold", model="cold")
    _, figures = run(redis_url, namespace, msgspec.structs.replace(SCENARIO, tenants=[HOT, other]))
    (swaps,) = figures.swaps
    assert swaps.num_by_reason["late"] > 10
    assert 0.1 < swaps.share < 0.25


def test_other_rules_starve_the_cold_model_or_drain_for_it(redis_url: str, namespace: str) -> None:
    by_rule = {rule: run(redis_url, f"{namespace}-{rule}", with_rule(SCENARIO, rule))[1] for rule in SwapRule}
    assert served(by_rule[SwapRule.LLAMA_SWAP])["cold"] < 0.1 < served(by_rule[SwapRule.STANDING])["cold"]
    shares = {rule: figures.swaps[0].share for rule, figures in by_rule.items()}
    assert min(shares[SwapRule.FIRST_COME], shares[SwapRule.STANDING]) > 10 * shares[SwapRule.LLAMA_SWAP]
    assert served(by_rule[SwapRule.FIRST_COME])["cold"] < served(by_rule[SwapRule.STANDING])["cold"]


def test_starts_of_sleeping_models_are_estimated_within_a_factor_of_two(redis_url: str, namespace: str) -> None:
    """Compare estimates after the first turns. Other arrivals may come before them, so an estimate is a mean."""
    groups = [
        msgspec.structs.replace(HOT, name=name, model=name, arrivals=Constant(per_s=2.5)) for name in ENGINES.models
    ]
    scenario = msgspec.structs.replace(SCENARIO, tenants=groups)
    asked: list[tuple[Note, float | None]] = []

    def ask(partition: Partition, note: Note) -> None:
        status = partition.do(partition.queue.status(note.request_id))
        assert status is not None
        is_asleep = status.readiness is not None and status.readiness.state is not ModelState.LOADED
        if is_asleep and 20 < note.arrived_s < 40:
            asked.append((note, status.estimated_start_s))

    simulate(redis_url, scenario, namespace, ask)
    ratios = [
        max(1.0, estimate_s) / max(1.0, note.claimed_s - note.arrived_s)
        for note, estimate_s in asked
        if note.claimed_s is not None and estimate_s is not None
    ]
    assert len(ratios) > 30
    assert len(ratios) > 0.95 * len(asked)
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) > 0.75 * len(ratios)
    assert 0.8 < median(ratios) < 1.25


def test_the_same_scenario_gives_the_same(redis_url: str, namespace: str) -> None:
    short = msgspec.structs.replace(SCENARIO, duration_s=15.0)
    first, again = (run(redis_url, f"{namespace}-{turn}", short)[1] for turn in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)


def test_one_of_several_devices_wakes_a_model_and_the_others_stay_free(redis_url: str, namespace: str) -> None:
    devices = msgspec.structs.replace(ENGINES, number=8)
    quiet = [msgspec.structs.replace(group, arrivals=Constant(per_s=1)) for group in (HOT, COLD)]
    scenario = Scenario(duration_s=30.0, engines=[devices], tenants=quiet)
    simulated, figures = run(redis_url, namespace, scenario)
    assert served(figures)["hot"] > 0.9
    assert sum(len(swap_log.swaps) for swap_log in simulated.swap_logs) <= 4


def test_a_group_of_several_models_sends_to_each_of_them(redis_url: str, namespace: str) -> None:
    both = Tenants(name="both", models=["hot", "cold"], arrivals=Constant(per_s=2), output=Fixed(tokens=5))
    simulated, figures = run(redis_url, namespace, Scenario(duration_s=30.0, engines=[ENGINES], tenants=[both]))
    notes = simulated.measures.notes.values()
    num_hot = sum(note.group.model == "hot" for note in notes)
    assert 0.3 < num_hot / len(notes) < 0.7
    assert figures.groups[0].num_requests == len(notes)


def test_the_command_prints_a_row_per_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shared.toml"
    path.write_text(
        """
        duration_s = 5
        engines = [{number = 1, models = ["a", "b"]}]
        tenants = [{name = "all", models = ["a", "b"], arrivals = {shape = "crowds", number = 2, every_s = 3}}]
        """
    )
    assert main(["sim", "rules", str(path), "--rule", "standing", "llama-swap"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "shared"
    assert [line.split()[0] for line in lines[2:4]] == ["standing", "llama-swap"]
    assert main(["sim", "run", str(path)]) == 0
    assert "longest wait until awake" in capsys.readouterr().out


def test_wrong_calls_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alone.toml"
    path.write_text("duration_s = 5\nengines = [{number = 1}]\ntenants = [{name = 't'}]\n")
    assert main(["sim", "rules", str(path)]) != 0
    assert "add models" in capsys.readouterr().err
    assert main(["sim", "rules", str(path), "--rule", "fair"]) != 0
    assert "rule must be one of standing, first-come, llama-swap" in capsys.readouterr().err
