"""Forecasts of when sleeping models wake, against what the rule does."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.swap.forecast import Turns, ready_in_s, time_left_s
from penstock.shared.swap.rule import Debts
from penstock.shared.swap.views import DeviceView, Memory, ModelView, SleepLevel, SwapOptions

DEVICE = DeviceView(memory=1)
OPTIONS = SwapOptions(max_share=0.2, patience_s={"standard": 1.0})
NOW_S = 1000.0
# A swap costs 2 s, which 8 s of service repay.
SLEEP_S, WAKE_S = 0.5, 1.5


def model(name: str, *, is_awake: bool = False, waits_s: float | None = None, **changes: Any) -> ModelView:
    values: dict[str, Any] = {
        "level": SleepLevel.AWAKE if is_awake else SleepLevel.HOST_MEMORY,
        "since_s": 0.0,
        "oldest_s": {} if waits_s is None else {"standard": NOW_S - waits_s},
        "sleep_s": SLEEP_S,
        "wake_s": WAKE_S,
        "used_s": NOW_S,
        "memory": Memory(awake=1),
        **changes,
    }
    return ModelView(name=name, **values)


def forecast(models: list[ModelView], soft_s: float = 0.0, turns: Turns | None = None) -> dict[str, float]:
    return ready_in_s(NOW_S, DEVICE, models, Debts(soft_s, soft_s), OPTIONS, turns or Turns())


def turns_of(**work_s: float) -> Turns:
    """Return turns after one of each model."""
    turns = Turns()
    for name, time_s in work_s.items():
        turns.record_turn(model(name, is_awake=True, since_s=NOW_S - time_s))
    return turns


def test_an_idle_device_wakes_a_model_in_the_time_of_a_swap() -> None:
    assert forecast([model("a", is_awake=True), model("b")]) == {"b": pytest.approx(SLEEP_S + WAKE_S)}
    assert forecast([model("a"), model("b", waits_s=0.5)]) == {"b": WAKE_S, "a": pytest.approx(WAKE_S + 2.0 + 2.0)}


def test_a_working_model_stays_for_the_patience_and_until_the_debt_is_repaid() -> None:
    turns = turns_of(a=1000.0)
    working = model("a", is_awake=True, waits_s=5.0)
    assert forecast([working, model("b", waits_s=0.25)], turns=turns)["b"] == pytest.approx(0.75 + 2.0)
    assert forecast([working, model("b", waits_s=0.25)], 2.0, turns)["b"] == pytest.approx(8.0 + 2.0)
    # The request that would arrive now has its patience before it.
    assert forecast([working, model("b")], turns=turns)["b"] == pytest.approx(1.0 + 2.0)


def test_a_model_that_an_operator_loaded_stays_for_its_time_or_the_longest_wait() -> None:
    for stays_s, expected_s in ((30.0, 30.0), (300.0, 59.75)):
        loaded = model("a", is_awake=True, stays_until_s=NOW_S + stays_s)
        assert forecast([loaded, model("b", waits_s=0.25)])["b"] == pytest.approx(expected_s + 2.0)


def test_an_overdue_wake_is_expected_to_take_as_long_again() -> None:
    assert [time_left_s(4.0, elapsed_s) for elapsed_s in (0.0, 3.0, 4.0, 10.0)] == [4.0, 1.0, 4.0, 10.0]


def test_a_model_is_left_when_its_work_ends() -> None:
    working = model("a", is_awake=True, num_running=1, since_s=NOW_S - 1.0)
    assert forecast([working, model("b", waits_s=0.0)], 2.0, turns_of(a=4.0))["b"] == pytest.approx(3.0 + 2.0)
    # Without a turn before, as long as a swap; and half a turn at least.
    assert forecast([working, model("b", waits_s=0.0)], 2.0)["b"] == pytest.approx(1.0 + 2.0)
    late = model("a", is_awake=True, num_running=1, since_s=NOW_S - 4.0)
    assert forecast([late, model("b", waits_s=0.0)], 2.0, turns_of(a=4.0))["b"] == pytest.approx(2.0 + 2.0)


def test_later_models_go_first() -> None:
    models = [model("a", is_awake=True), model("late", waits_s=9.0), model("new", waits_s=1.0)]
    times = forecast(models, turns=turns_of(late=3.0))
    assert times["late"] == pytest.approx(2.0)
    assert times["new"] == pytest.approx(2.0 + 3.0 + 2.0)


def test_a_model_that_is_about_to_sleep_is_forecast_too() -> None:
    leaving = model("a", is_awake=True, waits_s=0.0, can_wake=False)
    times = forecast([leaving, model("b", waits_s=9.0)], turns=turns_of(b=3.0))
    assert times == {"b": pytest.approx(2.0), "a": pytest.approx(2.0 + 3.0 + 2.0)}


def test_a_forecast_is_within_the_bound_of_the_rule_and_absent_without_one() -> None:
    options = SwapOptions(max_wait_s={"standard": 2.0}, patience_s={"standard": 1.0})
    models = [model("a", is_awake=True, waits_s=0.0), model("b", waits_s=0.0), model("c", can_wake=False)]
    turns = turns_of(a=1e6)
    times = ready_in_s(NOW_S, DEVICE, models, Debts(1e6, 1e6), options, turns)
    assert times == {"b": pytest.approx(1.0 + 2.0 + 3 * 3 * 2.0)}
    assert forecast([model("a", is_awake=True, is_pinned=True), model("b", waits_s=0.0)]) == {}


def test_a_turn_that_was_cut_counts_twice_and_new_turns_count_more_than_old_ones() -> None:
    turns = Turns()
    assert turns.work_s("a") is None
    turns.record_turn(model("a", is_awake=True, since_s=NOW_S - 4.0, num_running=1))
    assert turns.work_s("a") == 8.0
    turns.record_turn(model("a", is_awake=True, since_s=NOW_S - 1.0))
    assert turns.work_s("a") == pytest.approx(8.0 - 0.3 * 7.0)
