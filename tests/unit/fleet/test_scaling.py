"""The rule by which a fleet grows and shrinks: its sum, its windows, noise, nothing to do, the first request."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.worker.fleet.scaling import Load, Scaling, ScalingOptions


def load(wait_s: float | None, serving: int, *, waiting: int = 5, busy: float = 0.0, others: int = 0) -> Load:
    """Return a load; ``wait_s`` is the time that the serving engines need for the waiting requests."""
    return Load(
        num_waiting=waiting,
        num_running=math.ceil(busy),
        backlog_s=None if wait_s is None else wait_s * serving,
        num_serving=serving,
        num_others=others,
        busy=busy,
    )


def scaling(least: int = 1, most: int = 8, **options: float) -> Scaling:
    return Scaling(ScalingOptions(least=least, most=most, **options))


@pytest.mark.parametrize(
    ("wait_s", "serving", "target"),
    [(40.0, 1, 4), (41.0, 1, 5), (400.0, 1, 8), (20.0, 3, 6), (10.5, 4, 4), (5.0, 4, 2), (0.0, 4, 1), (None, 3, 1)],
)
def test_the_target_serves_all_requests_within_the_wanted_wait(wait_s: float | None, serving: int, target: int) -> None:
    assert scaling(grow_after_s=0.0, shrink_after_s=0.0).target(0.0, load(wait_s, serving), serving) == target


def test_running_requests_keep_their_engines_and_add_none() -> None:
    full = load(0.0, 4, waiting=0, busy=4.0)
    assert scaling(grow_after_s=0.0, shrink_after_s=0.0).target(0.0, full, 4) == 4
    assert scaling(grow_after_s=0.0, shrink_after_s=0.0).target(0.0, load(0.0, 4, waiting=0, busy=1.7), 4) == 3
    assert scaling(grow_after_s=0.0, shrink_after_s=0.0).target(0.0, load(0.0, 4, waiting=0, busy=0.1), 4) == 1


def test_engines_that_others_have_started_count() -> None:
    assert scaling(grow_after_s=0.0, shrink_after_s=0.0).target(0.0, load(40.0, 2, others=1), 1) == 7
    assert scaling(least=0, grow_after_s=0.0, shrink_after_s=0.0).target(0.0, load(None, 1, others=1), 0) == 0


def test_a_fleet_of_nothing_wakes_with_the_first_request_and_sleeps_when_all_is_done() -> None:
    rule = scaling(least=0, shrink_after_s=60.0)
    nothing = Load()
    assert [rule.target(float(t), nothing, 0) for t in range(3)] == [0, 0, 0]
    assert rule.target(3.0, load(None, 0, waiting=1), 0) == 1
    # A running request is reason enough to stay, however small it is.
    for t in range(4, 100):
        assert rule.target(float(t), load(0.0, 1, waiting=0, busy=0.02), 1) == 1
    idle = Load(num_serving=1)
    targets = [rule.target(float(t), idle, 1) for t in range(100, 162)]
    assert targets.index(0) == 60


def test_growth_waits_for_its_window_and_takes_the_least_of_it() -> None:
    rule = scaling(grow_after_s=3.0)
    waits = [80.0, 30.0, 50.0, 50.0, 50.0]
    assert [rule.target(float(t), load(wait, 1), 1) for t, wait in enumerate(waits)] == [1, 1, 1, 3, 3]


def test_a_gap_in_observations_does_not_hurry_scaling() -> None:
    """Redis was away for a minute: the wish of before holds until the next."""
    rule = scaling(grow_after_s=3.0)
    assert rule.target(0.0, load(10.0, 1), 1) == 1
    assert rule.target(60.0, load(80.0, 1), 1) == 1


@given(
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.0, 200.0), st.floats(0.0, 8.0)), max_size=60),
)
def test_it_never_turns_round_within_its_windows(
    least: int, more: int, loads: list[tuple[float, float, float]]
) -> None:
    """Whatever the load does: the bounds hold, and a fleet that has grown stays for as long as it waits to shrink."""
    rule = scaling(least=least, most=least + more, grow_after_s=5.0, shrink_after_s=30.0)
    now, present, changes = 0.0, least, [(0.0, least)]
    for step_s, wait_s, busy in loads:
        now += step_s
        target = rule.target(now, load(wait_s, present, busy=min(busy, present)), present)
        assert least <= target <= least + more
        if target != present:
            changes.append((now, target))
        present = target
    for (_, before), (at, up) in pairwise(changes):
        if up <= before:
            continue
        fallen = next((when for when, number in changes if when > at and number < up), math.inf)
        assert fallen - at >= 30.0


@given(st.integers(2, 20), st.lists(st.floats(-0.09, 0.09), min_size=20, max_size=80))
def test_noise_around_the_right_size_changes_nothing(engines: int, noise: list[float]) -> None:
    rule = scaling(most=40, grow_after_s=0.0, shrink_after_s=0.0)
    for second, error in enumerate(noise):
        assert rule.target(float(second), load(10.0 * (1 + error), engines), engines) == engines


@pytest.mark.parametrize(("least", "most", "wait_s"), [(3, 2, 1.0), (-1, 2, 1.0), (0, 0, 1.0), (1, 2, 0.0)])
def test_bounds_that_contradict_each_other_are_refused(least: int, most: int, wait_s: float) -> None:
    with pytest.raises(ConfigurationError, match=r"engines must be|wanted_wait must be"):
        ScalingOptions(least=least, most=most, wanted_wait_s=wait_s)
