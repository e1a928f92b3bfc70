"""Sessions of several turns, and a model in several partitions."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from penstock.ops.sim.reports.figures import Figures
from penstock.ops.sim.reports.report import make_report
from penstock.ops.sim.scenario import Deaths, Engines, Partitions, Scenario, Shard, Tenants
from penstock.ops.sim.shapes import Constant, Fixed
from penstock.ops.sim.simulation import Simulated, simulate
from penstock.ops.sim.speed import Speed

ENGINES = Engines(
    number=4, max_num_seqs=8, kv_tokens=8000, speed=Speed(fixed_ms=20, ms_per_seq=1, ms_per_prompt_token=0.1)
)
TALK = Tenants(
    name="talk",
    number=6,
    turns=4,
    think_s=0.5,
    arrivals=Constant(per_s=1.0),
    prompt=Fixed(tokens=100),
    output=Fixed(tokens=20),
)
CROWD = Tenants(name="crowd", number=30, arrivals=Constant(per_s=10), prompt=Fixed(tokens=100), output=Fixed(tokens=20))


def scenario(*tenants: Tenants, **changes: object) -> Scenario:
    values = {"duration_s": 20.0, "engines": [ENGINES], "tenants": [*tenants], "seed": 2, **changes}
    return Scenario(**values)


def figures_of(simulated: Simulated) -> Figures:
    report = make_report(simulated)
    assert report.holds, report.figures.checks
    return report.figures


@pytest.mark.parametrize("num_partitions", [1, 3])
def test_a_session_returns_to_its_warm_engine(redis_url: str, namespace: str, num_partitions: int) -> None:
    """Each prompt contains the earlier turns; the engine recomputes only a part of a block."""
    untold = msgspec.structs.replace(TALK, name="untold", tells_session=False)
    of = scenario(TALK, untold, partitions=[Partitions(number=num_partitions)])
    simulated = simulate(redis_url, of, namespace)
    told, by_chance = figures_of(simulated).sessions
    turns = sorted(
        (note for note in simulated.measures.notes.values() if note.session == "talk-1"), key=lambda note: note.turn
    )
    assert [note.num_prompt for note in turns] == [100, 220, 340, 460]
    assert [note.num_findable for note in turns] == [0, 120, 240, 360]
    assert [note.num_found for note in turns] == [0, 112, 240, 352]
    assert all(note.arrived_s > (before.ended_s or 0) for before, note in pairwise(turns))
    assert len({note.partition for note in turns}) == 1
    assert (told.found_share or 0) > 0.9 > 0.7 > (by_chance.found_share or 0)
    assert (told.ttft_p50_s or 0) < (by_chance.ttft_p50_s or 0)


def test_partitions_are_served_alike_and_each_has_its_tenants(redis_url: str, namespace: str) -> None:
    simulated = simulate(redis_url, scenario(CROWD, partitions=[Partitions(number=3)]), namespace)
    figures = figures_of(simulated)
    assert [one.name for one in figures.partitions] == ["simulated", "simulated#1", "simulated#2"]
    assert sum(one.num_tenants for one in figures.partitions) == CROWD.number
    assert all(one.num_requests > 0 for one in figures.partitions)
    assert max(one.wait_p99_s or 0 for one in figures.partitions) < 0.5
    ended = [note for note in simulated.measures.notes.values() if note.arrived_s < 15]
    assert all(note.ended_s is not None for note in ended)


def test_engines_help_out_where_something_waits(redis_url: str, namespace: str) -> None:
    """Half of them have their home where the only tenant is, and could not serve it alone."""
    only = msgspec.structs.replace(CROWD, number=1, arrivals=Constant(per_s=40))
    of = scenario(only, partitions=[Partitions(number=2)], duration_s=8.0)
    (group,) = figures_of(simulate(redis_url, of, namespace)).groups
    assert (group.wait_p99_s or 0) < 1


def test_a_partition_that_is_away_keeps_its_own_requests_waiting(redis_url: str, namespace: str) -> None:
    """Covers the death of an engine: its requests in other partitions resume immediately."""
    of = scenario(
        CROWD,
        partitions=[Partitions(number=2, spread=["crowd-0"])],
        shards=[Shard(models=["simulated#1"], away_at_s=8, away_for_s=4)],
        deaths=[Deaths(at_s=9, number=1)],
        duration_s=25.0,
    )
    simulated = simulate(redis_url, of, namespace)
    figures = figures_of(simulated)
    meanwhile = [note for note in simulated.measures.notes.values() if 8.5 < note.arrived_s < 11]
    here, there = ([note for note in meanwhile if note.partition == number] for number in range(2))
    assert {note.partition for note in simulated.measures.notes.values() if note.tenant == "crowd-0"} == {0, 1}
    assert all((note.claimed_s or 0) < 12 for note in here)
    assert all((note.claimed_s or 0) >= 12 for note in there)
    (outage,) = figures.outages
    assert outage.num_requests == len(
        [note for note in simulated.measures.notes.values() if 8 <= note.arrived_s < 12 and note.partition == 1]
    )
    (recovery,) = figures.recoveries
    assert recovery.num_gone_on == recovery.num_requests
