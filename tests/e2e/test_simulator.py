"""A scenario with a real engine, as the simulator is compared with it."""

from __future__ import annotations

import pytest

from penstock.ops.local.stack import LocalStack
from penstock.ops.sim.real.outcome import outcome_of
from penstock.ops.sim.real.recording import run_on_engines
from penstock.ops.sim.scenario import Engines, Scenario, Tenants
from penstock.ops.sim.shapes import Fixed

pytestmark = pytest.mark.xdist_group("deployment")

NUM = 6


async def test_a_scenario_is_run_by_real_engines(deployment: LocalStack) -> None:
    """The requests come all at once, and last longer than the scenario: their records are in order."""
    group = Tenants(
        name="recorded", number=2, at_start=NUM, prompt=Fixed(tokens=20), output=Fixed(tokens=5), knows_length=True
    )
    scenario = Scenario(duration_s=2.0, engines=[Engines(number=1)], tenants=[group])
    measures, kv_tokens = await run_on_engines(deployment.url, "demo", scenario)
    assert kv_tokens > 0
    assert len(measures.notes) == NUM
    claimed = [note for note in measures.notes.values() if note.claimed_s is not None]
    assert all(note.arrived_s <= (note.claimed_s or 0) <= (note.first_token_s or 0) for note in claimed)
    ended = [note for note in claimed if note.ended_s is not None]
    assert all((note.claimed_s or 0) <= (note.ended_s or 0) <= scenario.duration_s for note in ended)
    outcome = outcome_of(scenario, measures)
    assert outcome.tokens_per_s == len(ended) * 25 / scenario.duration_s
    # A claim for each request that was claimed by itself, and at least one in all: the engine looks anew at each end.
    assert bool(claimed) <= measures.num_claims["real"]
    assert measures.num_wasted["real"] < measures.num_claims["real"] or not claimed
