"""Whole simulations, small ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock.ops.cli import main
from penstock.ops.sim.reports.figures import Figures, Report
from penstock.ops.sim.reports.plots import draw
from penstock.ops.sim.reports.report import make_report
from penstock.ops.sim.scenario import (
    Autoscaling,
    DeathKind,
    Deaths,
    Engines,
    Scenario,
    Shard,
    Speed,
    Tenants,
)
from penstock.ops.sim.shapes import Burst, Constant, Fixed, Uniform
from penstock.ops.sim.simulation import Simulated, simulate
from penstock.shared.queue.policy import TenantPolicy

ENGINES = Engines(
    number=3,
    max_num_seqs=8,
    kv_tokens=4000,
    speed=Speed(fixed_ms=20, ms_per_seq=1, ms_per_prompt_token=0.1),
    append_every_s=0.2,
)
# 3 engines of 8 requests, 28 ms a step: each request of 40 tokens takes 1.1 s.
BUSY = Tenants(
    name="busy", number=5, arrivals=Constant(per_s=10), prompt=Uniform(least=10, most=200), output=Fixed(tokens=40)
)


def scenario(**changes: object) -> Scenario:
    values = {"duration_s": 20.0, "engines": [ENGINES], "tenants": [BUSY], "seed": 3, **changes}
    return Scenario(**values)


def figures_of(simulated: Simulated) -> Figures:
    report = make_report(simulated)
    assert report.holds, report.figures.checks
    return report.figures


def test_the_same_scenario_gives_the_same(redis_url: str, namespace: str) -> None:
    of = scenario(deaths=[Deaths(at_s=4, number=1, back_after_s=3)], duration_s=10.0)
    first, again = (figures_of(simulate(redis_url, of, f"{namespace}-{turn}")) for turn in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    other = figures_of(simulate(redis_url, msgspec.structs.replace(of, seed=4), f"{namespace}-other"))
    assert other.groups != first.groups


def test_requests_for_idle_engines_wait_one_round_trip(redis_url: str, namespace: str) -> None:
    tenants = [msgspec.structs.replace(BUSY, arrivals=Constant(per_s=1))]
    (group,) = figures_of(simulate(redis_url, scenario(tenants=tenants), namespace)).groups
    assert group.wait_p50_s == pytest.approx(0.001)
    # 40 steps of 21 ms, one of them with the prompt, and the round trip.
    assert group.total_p50_s == pytest.approx(0.85, abs=0.05)
    assert group.num_ended >= group.num_requests - 2


def test_tenants_get_tokens_by_their_weights(redis_url: str, namespace: str) -> None:
    crowd = Tenants(name="one", at_start=900, prompt=Fixed(tokens=50), output=Fixed(tokens=50))
    heavy = msgspec.structs.replace(crowd, name="three", policy=TenantPolicy(weight=3.0))
    simulated = simulate(redis_url, scenario(tenants=[crowd, heavy], duration_s=30.0), namespace)
    figures = figures_of(simulated)
    assert [one.num_tenants for one in figures.jain] == [2, 2]  # the simulation ends before its third window does
    assert all((one.index or 0) > 0.99 for one in figures.jain)
    one, three = (group.num_ended for group in figures.groups)
    assert 2.7 < three / one < 3.3


@pytest.mark.parametrize(("kind", "least_s", "most_s"), [(DeathKind.HOST, 2.0, 4.0), (DeathKind.PROCESS, 0.0, 0.5)])
def test_requests_of_a_dead_engine_are_resumed(
    redis_url: str, namespace: str, kind: DeathKind, least_s: float, most_s: float
) -> None:
    """Leases of 3 s reveal a host's death; the supervisor reports a process's."""
    deaths = [Deaths(at_s=8, number=1, kind=kind, back_after_s=2)]
    simulated = simulate(redis_url, scenario(deaths=deaths), namespace)
    figures = figures_of(simulated)
    (recovery,) = figures.recoveries
    assert recovery.num_requests > 0
    assert recovery.num_gone_on == recovery.num_requests
    assert least_s <= (recovery.claimed_p50_s or 0) <= (recovery.claimed_max_s or 0) <= most_s
    assert {sample.num_engines for sample in simulated.measures.samples if 8 < sample.at_s < 9.9} == {2}
    assert simulated.measures.samples[-1].num_engines == 3
    ended = [note for note in simulated.measures.notes.values() if note.arrived_s < 12]
    assert ended
    assert all(note.ended_s is not None for note in ended)


def test_engines_scale_with_the_waiting_requests(redis_url: str, namespace: str) -> None:
    rush = msgspec.structs.replace(BUSY, arrivals=Burst(per_s=1, burst_per_s=60, at_s=5, for_s=10))
    rule = Autoscaling(least=3, most=9, wanted_wait_s=1, look_every_s=1, start_s=3, down_after_s=2)
    simulated = simulate(redis_url, scenario(tenants=[rush], autoscaling=rule, duration_s=60.0), namespace)
    figures_of(simulated)
    engines = [sample.num_engines for sample in simulated.measures.samples if sample.at_s > 1]
    assert (min(engines), max(engines)) == (3, 9)
    assert engines[-1] < 9


def test_a_quota_holds_back_its_tenant_alone(redis_url: str, namespace: str) -> None:
    bounded = Tenants(name="bounded", at_start=20, output=Fixed(tokens=10), policy=TenantPolicy(requests_per_minute=5))
    simulated = simulate(redis_url, scenario(tenants=[BUSY, bounded]), namespace)
    busy, held_back = figures_of(simulated).groups
    assert held_back.num_ended == 5
    assert (busy.wait_p99_s or 0) < 0.5


def test_a_violated_guarantee_is_reported(redis_url: str, namespace: str) -> None:
    simulated = simulate(redis_url, scenario(), namespace)
    simulated.measures.longest_with_room_s = 2.5
    simulated.measures.num_stale = 1
    simulated.measures.notes.popitem()
    report = make_report(simulated)
    assert not report.holds
    assert [check.holds for check in report.figures.checks] == [False, False, False]


TEXT = """
duration_s = 12
[[engines]]
number = 2
[[tenants]]
name = "one"
arrivals = {shape = "constant", per_s = 3}
[[deaths]]
at_s = 6
number = 1
"""


def test_the_command_writes_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "scenario.toml", tmp_path / "out"
    file.write_text(TEXT)
    assert main(["sim", "run", str(file), "--seed", "5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "claims for each request" in printed
    assert "holds" in printed
    report = msgspec.json.decode((out / "report.json").read_bytes(), type=Report)
    assert report.figures.seed == 5
    assert json.loads((out / "report.json").read_bytes())["figures"]["duration_s"] == 12
    assert (out / "simulation.png").read_bytes().startswith(b"\x89PNG")
    before = (out / "simulation.svg").read_bytes()
    draw(report.figures, out)
    assert (out / "simulation.svg").read_bytes() == before


def test_the_command_reports_a_wrong_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(TEXT.replace("number = 2", "nunber = 2"))
    assert main(["sim", "run", str(file)]) == 1
    assert "engines[0].nunber; did you mean number?" in capsys.readouterr().err
    assert main(["sim", "run", str(tmp_path / "none.toml")]) == 1
    assert "none.toml cannot be read" in capsys.readouterr().err


def test_a_missing_library_is_reported_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.cli.command_parts.find_spec", lambda name: None)
    assert main(["sim", "run", str(tmp_path / "none.toml")]) == 1
    assert "pip install 'penstock-llm[sim]'" in capsys.readouterr().err


def test_a_scenario_is_compared_with_real_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(
        TEXT.partition("[[deaths]]")[0].replace("12", "4") + "at_start = 5\noutput = {tokens = 5, shape = 'fixed'}\n"
    )
    assert main(["sim", "compare", str(file)]) == 0
    rows = {
        line.split()[1]: line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("one")
    }
    num_really, num_simulated = map(int, rows["num_ended"])
    assert num_really > 0
    assert num_simulated >= 5
    assert float(rows["total_p50_s"][0]) > 0
    file.write_text(TEXT)
    assert main(["sim", "compare", str(file)]) == 1
    assert "without deaths, autoscaling, shards, partitions and sessions" in capsys.readouterr().err


def test_while_a_shard_is_away_its_models_wait_and_no_others(redis_url: str, namespace: str) -> None:
    """New requests are claimed after its return; running ones continue, and their end is delivered then."""
    engines = [msgspec.structs.replace(ENGINES, model=model) for model in ("here", "there")]
    calm = msgspec.structs.replace(BUSY, arrivals=Constant(per_s=5))
    tenants = [msgspec.structs.replace(calm, name=model, model=model) for model in ("here", "there")]
    shards = [Shard(models=["here"], away_at_s=8, away_for_s=4), Shard(models=["there"])]
    simulated = simulate(redis_url, scenario(engines=engines, tenants=tenants, shards=shards), namespace)
    figures = figures_of(simulated)
    notes = {
        model: [note for note in simulated.measures.notes.values() if note.group.model == model]
        for model in ("here", "there")
    }
    assert not [note for note in notes["here"] if 8 < (note.claimed_s or 0) < 12 or 8 < (note.ended_s or 0) < 12]
    assert [note for note in notes["there"] if 8 < (note.claimed_s or 0) < 12]
    assert [note for note in notes["here"] if note.claimed_s is not None and note.claimed_s < 8 and note.ended_s == 12]
    (outage,) = figures.outages
    assert outage.num_requests == sum(8 <= note.arrived_s < 12 for note in notes["here"]) > 0
    assert 0.3 < outage.share < 0.7
    assert (outage.claimed_p50_s or 0) < 2
    here, there = figures.groups
    assert (here.wait_p99_s or 0) > 3 > 1 > (there.wait_p99_s or 0)


def test_engines_that_die_during_a_shard_outage_are_detected_after_it(redis_url: str, namespace: str) -> None:
    of = scenario(
        duration_s=40.0,
        shards=[Shard(models=["simulated"], away_at_s=10, away_for_s=4)],
        deaths=[Deaths(at_s=12, share=0.34, kind=DeathKind.PROCESS), Deaths(at_s=12, share=0.34)],
    )
    figures = figures_of(simulate(redis_url, of, namespace))
    assert [loss.num_gone_on for loss in figures.recoveries] == [loss.num_requests for loss in figures.recoveries]
    assert all((loss.claimed_p50_s or 0) >= 2 for loss in figures.recoveries)
