"""Estimates of waits against the waits that follow, under virtual time: the same figures on any machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.ops.cli import main
from penstock.ops.sim.measures import Note
from penstock.ops.sim.reports.estimates import FOLDER, BandErrors, Estimates, band_errors, simulate_errors
from penstock.ops.sim.scenario import Autoscaling, Deaths, Engines, Scenario, Speed, Tenants, read_scenario
from penstock.ops.sim.shapes import Burst, Constant, Lognormal
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

# 8 requests at once of 1.2 s: 6 or 7 a second.
ENGINES = Engines(
    number=2, max_num_seqs=4, kv_tokens=8000, speed=Speed(fixed_ms=20, ms_per_seq=2, ms_per_prompt_token=0.02)
)
MOST_MEDIAN, MOST_P90 = 0.3, 1.0


def tenants(name: str, band: str, per_s: float, number: int = 4, **changes: object) -> Tenants:
    values = {
        "arrivals": Constant(per_s=per_s),
        "prompt": Lognormal(median=100, sigma=0.6, most=500),
        "output": Lognormal(median=35, sigma=0.5, most=150),
        **changes,
    }
    return Tenants(name=name, band=band, number=number, **values)


SCENARIOS = {
    "three bands": {
        "tenants": [
            tenants("people", "interactive", 2.0),
            tenants("services", "standard", 2.0),
            tenants("jobs", "batch", 4.5),
        ]
    },
    "ageing": {
        "tenants": [tenants("people", "interactive", 7.5), tenants("jobs", "batch", 1.5)],
        "queue": QueuePolicy(ageing_s=10.0, strictness=0.7),
        # The first waits are short, so their relative errors are large.
        "duration_s": 120.0,
    },
    "weights": {
        "tenants": [
            tenants("paying", "standard", 4.5, 1, policy=TenantPolicy(weight=3.0)),
            tenants("free", "standard", 3.5, 1),
            tenants("many", "standard", 1.0, 20),
        ]
    },
    "a burst": {
        "tenants": [
            tenants("people", "interactive", 1.0),
            tenants("rush", "standard", 0, arrivals=Burst(per_s=0.5, burst_per_s=20, at_s=20, for_s=15)),
        ]
    },
    "long and short": {
        "tenants": [
            tenants("short", "interactive", 4.0, output=Lognormal(median=15, sigma=0.5, most=60)),
            tenants("long", "batch", 2.0, output=Lognormal(median=100, sigma=0.5, most=300)),
        ],
        "queue": QueuePolicy(ageing_s=None),
    },
    "engines": {
        "tenants": [tenants("people", "interactive", 2.0), tenants("jobs", "batch", 8.0)],
        "deaths": [Deaths(at_s=40, number=1, back_after_s=30)],
        "autoscaling": Autoscaling(least=2, most=4, wanted_wait_s=20, look_every_s=10, start_s=15),
        "duration_s": 80.0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_estimated_waits_are_near_the_measured_ones(redis_url: str, namespace: str, name: str) -> None:
    """Compares requests and tenants. (A band is a mean of tenants, and one may wait ten times as long.)"""
    scenario = Scenario(engines=[ENGINES], seed=5, **{"duration_s": 60.0, **SCENARIOS[name]})
    errors = simulate_errors(redis_url, scenario, namespace)
    assert {one.band for one in errors} == {group.band for group in scenario.tenants}
    for one in errors:
        assert one.num_asked > 20
        assert one.num_unknown <= 0.1 * one.num_asked
        assert max(one.medians[:2]) <= MOST_MEDIAN, one
        assert max(one.p90s[:2]) <= MOST_P90, one


def test_errors_are_shares_of_waits() -> None:
    group = tenants("people", "batch", 1.0)
    notes = {
        str(number): Note(str(number), group, "people", 0.0, 1, 1, claimed_s=waited_s)
        for number, waited_s in enumerate([10.0, 20.0, 0.1, None])
    }
    guesses = [
        Estimates("0", "batch", (5.0, 10.0, 20.0)),
        Estimates("1", "batch", (10.0, 20.0, 40.0)),
        Estimates("2", "batch", (0.6, None, 1.1)),
        Estimates("3", "batch", (1.0, 1.0, 1.0)),
    ]
    scenario = Scenario(duration_s=1.0, engines=[ENGINES], tenants=[group])
    assert band_errors(scenario, guesses, notes) == [
        BandErrors(
            band="batch",
            num_asked=4,
            num_unclaimed=1,
            num_unknown=1,
            waited_p50_s=10.0,
            waited_p90_s=20.0,
            medians=[0.5, 0.0, 1.0],
            p90s=[0.5, 0.0, 1.0],
        )
    ]
    short = [Estimates("2", "batch", (0.6, 0.1, 1.1))]
    assert band_errors(scenario, short, notes)[0].medians == pytest.approx([0.5, 0.0, 1.0])


def test_the_scenarios_of_the_package_are_valid() -> None:
    names = [path.stem for path in FOLDER.glob("*.toml")]
    assert len(names) >= 7
    for path in FOLDER.glob("*.toml"):
        read_scenario(path.read_text())


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        'duration_s = 5\n[[engines]]\nnumber = 1\nmax_num_seqs = 2\n[[tenants]]\nname = "one"\nat_start = 20\n'
        "output = {shape = 'fixed', tokens = 20}\n"
    )
    assert main(["sim", "estimates", str(path)]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("SCENARIO  BAND")
    assert re.match(r"tiny +standard +20 +\d+ +\d+ +\d", row)
    assert main(["sim", "estimates", "--real"]) != 0
    assert "needs a FILE" in capsys.readouterr().err
