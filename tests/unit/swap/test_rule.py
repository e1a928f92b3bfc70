"""Properties of the rule by which models share a device, and its decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.swap.rule import Debts, Reason, Stay, Swap, decide, entry_s, lateness, longest_wait_s, repaid_per_s
from penstock.shared.swap.views import DeviceView, Memory, ModelView, SleepLevel, SwapOptions

from .shared_device import BACKOFF_S, BAND, DoneSwap, Model, SharedDevice

UNTIL_S = 120.0
ONE_MODEL = DeviceView(memory=1)
NO_DEBTS = Debts()

ARRIVALS = st.lists(st.tuples(st.floats(0, UNTIL_S), st.sampled_from([0.001, 0.1, 1.0, 20.0])), max_size=12)
MODELS = st.lists(
    st.tuples(
        st.sampled_from([0.1, 1.0, 4.0]),
        st.sampled_from([0.0, 0.5]),
        st.sampled_from([0.0, 2.0]),
        ARRIVALS,
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)
OPTIONS = st.builds(
    lambda share, wait_s: SwapOptions(max_share=share, max_wait_s={BAND: wait_s}),
    st.sampled_from([0.05, 0.2, 0.5]),
    st.sampled_from([2.0, 20.0, 1000.0]),
)


def run_device(loads: Sequence[tuple], options: SwapOptions, deaths_s: Sequence[float] = ()) -> SharedDevice:
    models = [
        Model(f"m{index}", wake_s, sleep_s, relost_s, sorted(arrivals), is_hot)
        for index, (wake_s, sleep_s, relost_s, arrivals, is_hot) in enumerate(loads)
    ]
    device = SharedDevice(models, options, deaths_s)
    device.run(UNTIL_S)
    return device


def dearest_of(device: SharedDevice) -> float:
    models = device.models
    return max(model.wake_s for model in models) + max(model.sleep_s + model.relost_s for model in models)


# Models that alternate at no price leave all the debt that there can be to those that come with much work after them.
ALTERNATING = [
    (1.0, 0.0, 0.0, [*((number * 1.1 + half, 0.001) for number in range(30)), (35.0 + half, 1000.0)], False)
    for half in (0.0, 0.55)
] + [(1.0, 0.0, 0.0, [(35.0 + number / 100, 1000.0)], False) for number in (1, 2, 3)]


@settings(max_examples=60)
@given(loads=MODELS, options=OPTIONS)
@example(loads=ALTERNATING, options=SwapOptions(max_wait_s={BAND: 1000.0}))
@example(loads=ALTERNATING, options=SwapOptions(max_wait_s={BAND: 5.0}))
def test_no_model_waits_beyond_the_bound(loads: list[tuple], options: SwapOptions) -> None:
    device = run_device(loads, options)
    bound_s = longest_wait_s(len(loads), dearest_of(device), options, BAND)
    assert [(model.name, wait_s) for model, wait_s, _ in device.waits if wait_s > bound_s + 1e-3] == []


@settings(max_examples=40)
@given(loads=MODELS, options=OPTIONS, deaths_s=st.lists(st.floats(0, UNTIL_S), max_size=4))
def test_each_death_adds_at_most_one_bound_to_a_wait(
    loads: list[tuple], options: SwapOptions, deaths_s: list[float]
) -> None:
    device = run_device(loads, options, deaths_s)
    bound_s = longest_wait_s(len(loads), dearest_of(device), options, BAND)
    for model, wait_s, num_deaths in device.waits:
        assert wait_s <= (num_deaths + 1) * (bound_s + BACKOFF_S) + 1e-3, model.name


@settings(max_examples=60)
@given(loads=MODELS, options=OPTIONS, deaths_s=st.lists(st.floats(0, UNTIL_S), max_size=2))
def test_a_model_with_work_is_left_in_debt_only_beyond_the_longest_wait(
    loads: list[tuple], options: SwapOptions, deaths_s: list[float]
) -> None:
    for swap in run_device(loads, options, deaths_s).swaps:
        if swap.is_from_working:
            assert swap.reason in (Reason.LATE, Reason.MAX_WAIT)
            assert (swap.debts.soft_s if swap.reason is Reason.LATE else swap.debts.hard_s) <= 1e-5
        else:
            assert swap.reason is Reason.EMPTY


@settings(max_examples=60)
@given(loads=MODELS, options=OPTIONS)
def test_swaps_between_working_models_keep_to_their_share_in_any_window(
    loads: list[tuple], options: SwapOptions
) -> None:
    device = run_device(loads, options)
    dearest = dearest_of(device)
    for series, per_s, num_more in (
        (_series(device.swaps, {Reason.LATE}), repaid_per_s(options), 3),
        (_series(device.swaps, {Reason.LATE, Reason.MAX_WAIT}), 1.0, 4),
    ):
        for swaps in series:
            for first in range(len(swaps)):
                cost_s = swapping_s = 0.0
                for swap in swaps[first:]:
                    cost_s += swap.cost_s
                    swapping_s += swap.end_s - swap.start_s
                    serving_s = swap.end_s - swaps[first].start_s - swapping_s
                    assert cost_s <= per_s * serving_s + num_more * dearest + 1e-3


def _series(swaps: Sequence[DoneSwap], reasons: set[Reason]) -> list[list[DoneSwap]]:
    """Return the swaps without a break by one of another kind."""
    series: list[list[DoneSwap]] = [[]]
    for swap in swaps:
        if swap.is_from_working and swap.reason in reasons:
            series[-1].append(swap)
        else:
            series.append([])
    return series


def model_view(name: str, **fields: Any) -> ModelView:
    values: dict[str, Any] = {
        "level": SleepLevel.HOST_MEMORY,
        "since_s": 0.0,
        "wake_s": 2.0,
        "memory": Memory(awake=1),
    } | fields
    return ModelView(name=name, **values)


def awake(name: str = "a", **fields: Any) -> ModelView:
    return model_view(name, level=SleepLevel.AWAKE, **({"num_running": 1} | fields))


def choose(now_s: float, *models: ModelView, debts: Debts = NO_DEBTS, **options: Any) -> Swap | Stay:
    return decide(now_s, ONE_MODEL, models, debts, SwapOptions(**options))


def test_an_idle_model_is_left_at_once_and_a_working_one_when_the_other_is_late() -> None:
    waiting = model_view("b", oldest_s={"standard": 100.0})
    assert choose(100.0, awake(num_running=0), waiting) == Swap(Reason.EMPTY, ("a",), entering="b")
    assert choose(100.0, awake(), waiting) == Stay(105.0)
    assert choose(105.0, awake(), waiting) == Swap(Reason.LATE, ("a",), entering="b")


def test_debt_delays_a_swap_and_the_longest_wait_needs_the_hard_debt_alone() -> None:
    waiting = model_view("b", oldest_s={"interactive": 0.0})
    assert choose(10.0, awake(), waiting, debts=Debts(5.0, 5.0)) == Stay(30.0)
    assert choose(10.0, awake(), waiting, debts=Debts(50.0, 5.0)) == Stay(60.0)
    assert choose(60.0, awake(), waiting, debts=Debts(50.0, 3.0)) == Stay(63.0)
    assert choose(63.0, awake(), waiting, debts=Debts(50.0, 0.0)) == Swap(Reason.MAX_WAIT, ("a",), entering="b")


def test_the_backlog_of_a_model_counts_from_its_last_turn() -> None:
    hot = model_view("hot", oldest_s={"interactive": 0.0}, since_s=99.0)
    cold = model_view("cold", oldest_s={"interactive": 90.0})
    choice = choose(100.0, awake(), hot, cold)
    assert isinstance(choice, Swap)
    assert choice.entering == "cold"


def test_a_deadline_makes_a_model_late_unless_it_cannot_be_met() -> None:
    urgent = model_view("b", oldest_s={"batch": 0.0}, deadline_s=10.0, service_s=3.0)
    options = SwapOptions()
    assert [lateness(urgent, now_s, options) >= 1 for now_s in (4.0, 5.5, 8.0, 8.5)] == [False, True, True, False]
    assert choose(1.0, awake(), urgent) == Stay(5.0)


def test_models_that_cannot_enter_do_not_count() -> None:
    blocked = model_view("b", oldest_s={"interactive": 0.0}, can_wake=False)
    large = model_view("c", oldest_s={"interactive": 0.0}, memory=Memory(awake=2))
    assert choose(50.0, awake(), blocked, large) == Stay()
    waiting = model_view("d", oldest_s={"interactive": 0.0})
    assert choose(50.0, awake(is_pinned=True), waiting) == Stay()


def test_a_working_model_stays_for_its_least_time() -> None:
    waiting = model_view("b", oldest_s={"interactive": 0.0})
    assert choose(10.0, awake(since_s=5.0), waiting, min_awake_s=8.0) == Stay(13.0)


def test_a_model_has_its_own_patience_and_least_time() -> None:
    waiting = model_view("b", oldest_s={"standard": 10.0}, own_options=SwapOptions(patience_s={"standard": 2.0}))
    assert choose(10.0, awake(), waiting) == Stay(12.0)
    assert choose(12.0, awake(), waiting) == Swap(Reason.LATE, ("a",), entering="b")
    steady = awake(since_s=5.0, own_options=SwapOptions(min_awake_s=8.0))
    assert choose(12.0, steady, waiting) == Stay(13.0)


def test_a_model_that_an_operator_loaded_stays_until_another_is_beyond_its_longest_wait() -> None:
    waiting = model_view("b", oldest_s={"standard": 0.0})
    loaded = awake(num_running=0, stays_until_s=300.0)
    assert choose(10.0, loaded, waiting) == Stay(60.0)
    assert choose(60.0, loaded, waiting) == Swap(Reason.MAX_WAIT, ("a",), entering="b")
    assert choose(300.0, loaded, waiting, max_wait_s={"standard": 900.0}) == Swap(Reason.LATE, ("a",), entering="b")
    # It leaves after one without requests, and does not sleep before.
    device, idle = DeviceView(memory=2), awake("c", num_running=0)
    assert decide(60.0, device, [loaded, idle, waiting], NO_DEBTS, SwapOptions()) == Swap(
        Reason.EMPTY, ("c",), entering="b"
    )
    assert choose(100.0, loaded, idle_sleep_s=10.0) == Stay(300.0)


def test_idle_models_sleep_and_then_end() -> None:
    options: dict[str, Any] = {"idle_sleep_s": 300.0, "idle_unload_s": 1800.0}
    idle = awake(num_running=0, used_s=10.0)
    assert choose(20.0, idle, **options) == Stay(310.0)
    assert choose(310.0, idle, **options) == Swap(Reason.IDLE, asleep=("a",))
    assert choose(310.0, model_view("a", used_s=10.0), **options) == Stay(1810.0)
    assert choose(1810.0, model_view("a", used_s=10.0), **options) == Swap(Reason.IDLE, ended=("a",))
    assert choose(1810.0, awake(num_running=0, is_pinned=True), **options) == Stay()


def test_debts_have_a_credit_and_a_limit() -> None:
    models, options = [awake(sleep_s=1.0), model_view("b")], SwapOptions(max_share=0.2)
    assert Debts().after_serving(1e6, models, options) == Debts(-6.0, 0.0)
    assert Debts(5.5, 5.5).after_swap(3.0, models) == Debts(6.0, 6.0)
    assert Debts(2.0, 1.0).after_serving(4.0, models, options) == Debts(1.0, 0.0)


@pytest.mark.parametrize(
    "values", [{"max_share": 0.0}, {"max_share": 0.6}, {"min_awake_s": math.inf}, {"max_wait_s": {"batch": 0.0}}]
)
def test_wrong_options_are_refused_by_name(values: dict) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(values))):
        SwapOptions(**values)


def test_a_model_that_is_awake_elsewhere_leaves_before_another_is_late_but_not_in_debt() -> None:
    standing = model_view("b", oldest_s={"standard": 100.0})
    twice = awake(is_elsewhere=True)
    assert choose(100.0, twice, standing) == Swap(Reason.LATE, ("a",), entering="b")
    assert choose(100.0, awake(), standing) == Stay(105.0)
    assert choose(100.0, twice, standing, debts=Debts(0.25, 0.25)) == Stay(101.0)


def test_a_model_that_is_awake_elsewhere_displaces_none_that_this_device_alone_serves() -> None:
    more = model_view("b", oldest_s={"interactive": 0.0}, is_elsewhere=True)
    assert choose(100.0, awake(), more) == Stay()
    assert choose(100.0, awake(num_running=0), more) == Swap(Reason.EMPTY, ("a",), entering="b")
    assert choose(100.0, awake(is_elsewhere=True), more) == Swap(Reason.LATE, ("a",), entering="b")


def test_the_time_to_enter_counts_models_that_leave() -> None:
    entering = model_view("b", wake_s=2.0)
    costs: dict[str, Any] = {"sleep_s": 0.5, "relost_s": 1.0}
    assert entry_s(ONE_MODEL, [awake(**costs), entering], entering) == 3.5
    assert entry_s(ONE_MODEL, [awake(is_elsewhere=True, **costs), entering], entering) == 2.0
    assert entry_s(ONE_MODEL, [entering], entering) == 2.0
