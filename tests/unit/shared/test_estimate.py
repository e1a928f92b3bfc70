"""Estimates of waiting times: closed forms, order, unknown figures."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.queue.estimate import Estimator
from penstock.shared.queue.state import BandState, LaneState, Limits, QueueState, Rates, merged_state

# Requests that are held for 2 s; 10 slots end 5 of them a second.
RATES = Rates(ended=150, tokens=15_000, computed_tokens=7500, held_s=300.0)


def band(name: str, depth: int = 0, *, age_s: float = 0.0, entered: float = 0.0, tenants: int = 1) -> BandState:
    rates = msgspec.structs.replace(RATES, entered_per_s=entered, entered_before_per_s=entered)
    return BandState(
        band=name, depth=depth, num_tokens=100 * depth, age_s=age_s, num_tenants=tenants if depth else 0, rates=rates
    )


def queue(*bands: BandState, **changes: object) -> QueueState:
    values = {"bands": bands, "num_running": 10, "num_engines": 1, **changes}
    return QueueState(**values)


def lane(tenant: str, depth: int, time: float | None = 0.0, weight: float = 1.0) -> LaneState:
    return LaneState(tenant=tenant, depth=depth, num_tokens=100 * depth, weight=weight, age_s=10.0, virtual_time=time)


def with_lanes(name: str, *lanes: LaneState, entered: float = 0.0) -> BandState:
    depth = sum(one.depth for one in lanes)
    return msgspec.structs.replace(band(name, depth, age_s=10.0, entered=entered), num_tenants=len(lanes), lanes=lanes)


def own_s(state: QueueState, tenant: str, ahead: int | None = None) -> float:
    (own,) = (one for one in state.bands[0].lanes if one.tenant == tenant)
    wait_s = Estimator(state).lane_s(state.bands[0].band, own, Limits(weight=own.weight), ahead)
    assert wait_s is not None
    return wait_s


def test_one_band_is_served_as_fast_as_slots_get_free() -> None:
    estimator = Estimator(queue(band("a", 50)))
    assert estimator.band_s("a") == pytest.approx(50 / 5, rel=0.01)
    assert estimator.tokens_per_s == pytest.approx(500)


def test_without_engines_or_rates_and_in_a_pause_nothing_is_known() -> None:
    for state in (
        queue(band("a", 5), num_engines=0),
        queue(band("a", 5), is_paused=True),
        queue(BandState(band="a", depth=5)),
        queue(band("a", 5), num_running=0),
    ):
        assert Estimator(state).band_s("a") is None
        assert Estimator(state).lane_s("a", lane("t", 5), Limits()) is None
        assert Estimator(state).lanes_s("a", [(lane("t", 5), Limits())] * 50) == [None] * 50
    assert Estimator(queue(band("a", 5), num_engines=0)).returned_s(0) is None
    assert Estimator(queue(BandState(band="a"), num_running=0)).tokens_per_s == 0.0


def test_requests_do_not_wait_while_engines_have_capacity() -> None:
    """Even if it is not known how fast they are."""
    assert Estimator(queue(band("a"), num_free=3.0)).band_s("a") == 0.0
    assert Estimator(queue(BandState(band="a", depth=3), num_free=3.0)).band_s("a") == 0.0
    assert Estimator(queue(BandState(band="a"), num_free=3.0)).returned_s(2) == 0.0


def test_engines_that_begin_and_end_count_at_once() -> None:
    waits = [Estimator(queue(band("a", 100), num_running=slots)).band_s("a") for slots in (5, 10, 20)]
    assert [round(wait or 0) for wait in waits] == [40, 20, 10]


def test_continuing_arrivals_in_the_band_above_take_their_share() -> None:
    """The band above has 4 of 5 requests a second, for as long as the one below waits."""
    above = band("a", 10, entered=4.0)
    estimator = Estimator(queue(above, band("b", 20)))
    assert estimator.band_s("a") == pytest.approx(2, rel=0.02)
    # 10 above and 20 own leave a 1 a second.
    assert estimator.band_s("b") == pytest.approx(30, rel=0.05)
    assert Estimator(queue(band("a", 10, entered=5.0), band("b", 20))).band_s("b") is None


def test_aged_requests_get_the_rest_that_strictness_leaves() -> None:
    """Above is more than can be served for ever; below has aged, and gets a tenth."""
    above = band("a", 1000, entered=10.0)
    state = queue(above, band("b", 20, age_s=100.0), ageing_s=30.0, strictness=0.9)
    # Half a request a second, until the first of them is too young.
    assert Estimator(state).band_s("b") == pytest.approx(40, rel=0.1)
    young = queue(above, band("b", 20, age_s=0.0), ageing_s=30.0, strictness=0.9)
    assert Estimator(young).band_s("b") == pytest.approx(70, rel=0.1)


def test_tenants_wait_by_their_weights() -> None:
    state = queue(with_lanes("a", lane("heavy", 90, weight=3.0), lane("light", 90)))
    # The heavy one has three quarters, until it has nothing left.
    assert own_s(state, "heavy") == pytest.approx(120 / 5, rel=0.05)
    assert own_s(state, "light") == pytest.approx(180 / 5, rel=0.05)


def test_a_tenant_that_has_had_more_waits_for_the_others() -> None:
    state = queue(with_lanes("a", lane("first", 10, time=0.0), lane("later", 10, time=1000.0)))
    assert own_s(state, "first") == pytest.approx(2, rel=0.1)
    assert own_s(state, "later") == pytest.approx(4, rel=0.1)
    assert own_s(state, "later", 0) == pytest.approx(2.2, rel=0.1)


def test_of_many_lanes_a_few_stand_for_all() -> None:
    lanes = [lane(f"t{number}", 5) for number in range(64)]
    sampled = msgspec.structs.replace(with_lanes("a", *lanes), depth=5000, num_tokens=500_000, num_tenants=1000)
    assert own_s(queue(sampled), "t0") == pytest.approx(900, rel=0.05)


def test_interpolated_lanes_are_as_computed_ones() -> None:
    lanes = [lane(f"t{number}", 1 + number % 7, time=10.0 * number) for number in range(60)]
    state = queue(with_lanes("a", *lanes))
    together = Estimator(state).lanes_s("a", [(one, Limits()) for one in lanes])
    alone = [own_s(state, one.tenant) for one in lanes]
    assert together == pytest.approx(alone, rel=0.1, abs=1.0)


@pytest.mark.parametrize(
    ("limits", "wait_s"),
    [
        (Limits(requests_per_minute=10), 60 * (29 / 10 - 1)),
        (Limits(requests_per_minute=10, blocked_for_s=20.0), 20 + 60 * 29 / 10),
        (Limits(tokens_per_minute=500), 60 * (29 * 50 / 500 - 1)),
        (Limits(max_concurrent_requests=2, num_running=2), 30 * 2.0 / 2),
        (Limits(max_concurrent_requests=1, num_running=1, blocked_for_s=math.inf), 30 * 2.0),
        (Limits(), 6.0),
    ],
)
def test_quotas_hold_a_tenant_back(limits: Limits, wait_s: float) -> None:
    state = queue(with_lanes("a", lane("t", 30)))
    estimate = Estimator(state).lane_s("a", state.bands[0].lanes[0], limits)
    assert estimate == pytest.approx(wait_s, rel=0.05)


def test_requeued_requests_come_first() -> None:
    state = queue(band("a", 10), num_returned=5)
    estimator = Estimator(state)
    assert estimator.returned_s(0) == pytest.approx(0.2)
    assert estimator.returned_s(4) == pytest.approx(1.0)
    assert estimator.band_s("a") == pytest.approx(3.0, rel=0.1)


def test_partitions_are_served_by_the_same_engines() -> None:
    half = queue(band("a", 25, entered=1.0), num_running=5)
    whole = Estimator(merged_state([half, half]))
    assert whole.band_s("a") == pytest.approx(10, rel=0.01)
    assert merged_state([half]) is half


DEPTHS = st.integers(0, 300)
AGES = st.floats(0.0, 300.0)
COMING = st.floats(0.0, 13.0)
BANDS = st.lists(st.tuples(DEPTHS, AGES, COMING), min_size=1, max_size=4)


def drawn_queue(drawn: list[tuple[int, float, float]], **changes: object) -> QueueState:
    bands = [
        band(f"b{i}", depth, age_s=age_s, entered=num_entered) for i, (depth, age_s, num_entered) in enumerate(drawn)
    ]
    return queue(*bands, **changes)


@given(BANDS, st.floats(0.0, 60.0) | st.none(), st.floats(0.01, 1.0), st.integers(0, 5), st.integers(0, 20))
def test_a_wait_is_a_number_or_unknown(
    drawn: list[tuple[int, float, float]], ageing_s: float | None, strictness: float, returned: int, free: int
) -> None:
    state = drawn_queue(drawn, ageing_s=ageing_s, strictness=strictness, num_returned=returned, num_free=float(free))
    for one in state.bands:
        wait_s = Estimator(state).band_s(one.band)
        assert wait_s is None or (math.isfinite(wait_s) and wait_s >= 0)


@given(BANDS)
def test_without_ageing_a_lower_band_never_starts_sooner(drawn: list[tuple[int, float, float]]) -> None:
    estimator = Estimator(drawn_queue(drawn))
    waits = [estimator.band_s(f"b{level}") for level in range(len(drawn))]
    numbers = [math.inf if wait is None else wait for wait in waits]
    assert all(high <= low + 0.5 + 0.05 * low for high, low in pairwise(numbers))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 5000.0), st.floats(0.1, 10.0)), min_size=1, max_size=6),
    st.floats(0.0, 3.0),
)
def test_a_later_place_never_starts_sooner(lanes: list[tuple[int, float, float]], entered: float) -> None:
    own = [lane(f"t{i}", depth, time, weight) for i, (depth, time, weight) in enumerate(lanes)]
    state = queue(with_lanes("a", *own, entered=entered))
    estimator = Estimator(state)
    for one in own:
        waits = [estimator.lane_s("a", one, Limits(weight=one.weight), ahead) for ahead in range(one.depth)]
        numbers = [math.inf if wait is None else wait for wait in waits]
        assert numbers == sorted(numbers)
