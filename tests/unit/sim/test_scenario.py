"""Valid scenario files, and the messages about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ops import sim
from penstock.ops.sim.scenario import DeathKind, Scenario, read_scenario
from penstock.ops.sim.shapes import Burst, Lognormal
from penstock.shared.errors import ConfigurationError

SCENARIOS = sorted((Path(sim.__file__).parent / "scenarios").rglob("*.toml"))
LEAST = """
duration_s = 10
[[engines]]
number = 2
[[tenants]]
name = "one"
"""


def test_omitted_settings_have_defaults() -> None:
    scenario = read_scenario(LEAST)
    assert (scenario.seed, scenario.engines[0].max_num_seqs, scenario.tenants[0].number) == (0, 64, 1)


def test_tables_are_read_by_their_shape() -> None:
    text = LEAST + (
        'arrivals = {shape = "burst", burst_per_s = 9, at_s = 1, for_s = 2}\n'
        'output = {shape = "lognormal", median = 80, sigma = 0.6, most = 400}\n'
        '[[deaths]]\nat_s = 3\nshare = 0.5\nkind = "process"\n'
    )
    scenario = read_scenario(text)
    assert scenario.tenants[0].arrivals == Burst(burst_per_s=9, at_s=1, for_s=2)
    assert scenario.tenants[0].output == Lognormal(median=80, sigma=0.6, most=400)
    assert scenario.tenants[0].most_tokens == 400
    assert scenario.deaths[0].kind is DeathKind.PROCESS


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_shipped_scenarios_can_be_read(path: Path) -> None:
    assert isinstance(read_scenario(path.read_text()), Scenario)


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) > 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("nmae = 3", "tenants[0].nmae; did you mean name?"),
        ("policy = {wieght = 3}", "tenants[0].policy.wieght; did you mean weight?"),
        ('arrivals = {shape = "constant", per_a = 3}', "tenants[0].arrivals.per_a; did you mean per_s?"),
        ("[autoscaling]\nxyzzy = 1", "autoscaling.xyzzy; there are least, most"),
        ("policy = {weight = 0}", "weight must be a number in"),
        ("number = 0", "number must be a number from 1 on, got 0"),
        ('band = "bacth"', "band must be one of interactive, standard, batch, got 'bacth'"),
        ('prompt = {shape = "uniform", least = 9, most = 3}', "least must be at most 3"),
        ('arrivals = {shape = "wave"}', "Invalid value 'wave'"),
        ('model = "other"', "model must be one that engines serve (simulated), got 'other'"),
        ('[[shards]]\nmodels = ["other"]', "models of a shard must be served by engines, got 'other'"),
        ('[[shards]]\nmodels = ["simulated", "simulated"]', "each model is on one shard"),
        (
            '[[engines]]\nmodel = "b"\nnumber = 1\n[[deaths]]\nat_s = 1\nnumber = 1',
            "not a number, where there are several",
        ),
        ("[[deaths]]\nat_s = 1", "deaths need one of share and number"),
        ("[autoscaling]\nleast = 3\nmost = 2\nwanted_wait_s = 1", "least must be from 1 to most"),
        ('[[tenants]]\nname = "one"', "the names of tenants must differ"),
        ('[[engines]]\nnumber = 1\nmodels = ["b", "b"]', "models of an engine must differ, got b, b"),
        (
            '[[engines]]\nnumber = 1\nmodels = ["b"]\n[[deaths]]\nat_s = 1\nshare = 1',
            "all have several models, or none",
        ),
        (
            '[[engines]]\nnumber = 1\nmodels = ["b"]\n[[deaths]]\nat_s = 1\nshare = 1\nkind = "process"',
            'deaths of engines of several models need kind = "host"',
        ),
        ('[[engines]]\nnumber = 1\nmodels = ["b"]\nswaps = {rule = "fair"}', "Invalid enum value 'fair'"),
        ('[[engines]]\nnumber = 1\nmodels = ["b"]\nswaps = {wake = 1}', "engines[1].swaps.wake; did you mean wake_s?"),
        (
            '[[engines]]\nnumber = 1\nmodels = ["b"]\nswaps = {options = {max_share = 0.9}}',
            "max_share must be above 0 and at most 0.5, got 0.9",
        ),
        (
            '[[engines]]\nnumber = 1\nmodels = ["b"]\nswaps = {options = {idle_sleep_s = 9}}',
            "idle_sleep_s and idle_unload_s are not simulated",
        ),
        ('models = ["other"]', "model must be one that engines serve (simulated), got 'other'"),
        ('arrivals = {shape = "crowds", number = 1, every_s = 0}', "every_s must be a number from 0.001 on"),
        ("number = ", "the scenario is no TOML"),
    ],
)
def test_a_mistake_is_named(more: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_scenario(LEAST + more)
    assert message in str(caught.value)


def test_there_must_be_engines() -> None:
    with pytest.raises(ConfigurationError, match="engines"):
        read_scenario('duration_s = 10\nengines = []\n[[tenants]]\nname = "one"\n')
