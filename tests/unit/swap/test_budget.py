"""Which models fit on a device together, which must leave, and how deep they sleep."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.swap.budget import Departures, departures, device_bytes, fits_alone, sleep_level
from penstock.shared.swap.views import DeviceView, Memory, ModelView, SleepLevel

AWAKE, ASLEEP, PROCESS, DISK = SleepLevel


def model_view(name: str, level: SleepLevel = AWAKE, awake: int = 10, asleep: int = 1, **fields: Any) -> ModelView:
    values: dict[str, Any] = {"since_s": 0.0, "memory": Memory(awake=awake, asleep=asleep, weights=8)} | fields
    return ModelView(name=name, level=level, **values)


def test_idle_models_leave_first_and_then_the_one_awake_longest() -> None:
    models = [
        model_view("old", num_running=1, since_s=1.0),
        model_view("new", num_running=1, since_s=2.0),
        model_view("idle", used_s=5.0),
        model_view("unused", used_s=3.0),
    ]
    entering = model_view("entering", DISK)
    assert [departures(DeviceView(memory=memory), models, entering) for memory in (50, 41, 32, 23, 14, 13, 10)] == [
        Departures(),
        Departures(("unused",)),
        Departures(("unused", "idle")),
        Departures(("unused", "idle", "old")),
        Departures(("unused", "idle", "old", "new")),
        Departures(("unused", "idle", "old", "new"), ("new",)),
        Departures(("unused", "idle", "old", "new"), ("new", "old", "unused", "idle")),
    ]


def test_of_working_models_one_that_is_awake_elsewhere_leaves_first() -> None:
    models = [model_view("old", num_running=1), model_view("twice", num_running=1, since_s=2.0, is_elsewhere=True)]
    assert departures(DeviceView(memory=21), models, model_view("entering", DISK)) == Departures(("twice",))


def test_a_model_that_never_fits() -> None:
    pinned, large = model_view("pinned", is_pinned=True), model_view("large", DISK, awake=15)
    assert departures(DeviceView(memory=24), [pinned, large], large) is None
    assert not fits_alone(DeviceView(memory=24), large, [pinned, large])
    assert fits_alone(DeviceView(memory=25), large, [pinned, large])


def test_a_model_that_wakes_needs_no_more_than_the_difference() -> None:
    sleeper = model_view("b", ASLEEP)
    assert departures(DeviceView(memory=20), [model_view("a"), sleeper], sleeper) == Departures()


def test_levels_by_what_the_host_has_left_and_by_what_waking_takes() -> None:
    sleeper, leaving = model_view("b", ASLEEP), model_view("a", wake_s_of={PROCESS: 4.0, DISK: 10.0})
    assert sleep_level(DeviceView(host_memory=16), [sleeper, leaving], leaving) is ASLEEP
    assert sleep_level(DeviceView(host_memory=15), [sleeper, leaving], leaving) is PROCESS
    slow = model_view("a", wake_s_of={PROCESS: 8.0, DISK: 10.0})
    assert sleep_level(DeviceView(host_memory=15), [sleeper, slow], slow) is DISK
    unmeasured = model_view("a")
    assert sleep_level(DeviceView(), [unmeasured], unmeasured) is PROCESS


LEVELS = st.sampled_from(SleepLevel)
MODELS = st.lists(st.tuples(LEVELS, st.integers(1, 9), st.integers(0, 2), st.booleans(), st.integers(0, 2)), max_size=6)


@settings(max_examples=80)
@given(MODELS, st.integers(1, 20))
def test_after_departures_all_fit_and_none_left_in_vain(rows: list[tuple], memory: int) -> None:
    models = [
        model_view(
            f"m{index}", level, awake=awake + asleep, asleep=asleep, is_pinned=is_pinned, num_running=num_running
        )
        for index, (level, awake, asleep, is_pinned, num_running) in enumerate(rows)
    ]
    entering = model_view("entering", DISK, awake=5)
    leaving = departures(DeviceView(memory=memory), models, entering)
    if leaving is None:
        return
    by_name = {one.name: one for one in models}
    levels = {one.name: one.level for one in models} | dict.fromkeys(leaving.asleep, PROCESS)
    levels |= dict.fromkeys(leaving.ended, DISK)
    assert not any(by_name[name].is_pinned for name in (*leaving.asleep, *leaving.ended))

    def used(levels: dict[str, SleepLevel]) -> int:
        return 5 + device_bytes([_at(one, levels[one.name]) for one in models])

    assert used(levels) <= memory
    if leaving.asleep and not leaving.ended:
        assert used(levels | {leaving.asleep[-1]: AWAKE}) > memory


def _at(one: ModelView, level: SleepLevel) -> ModelView:
    return model_view(one.name, level, awake=one.memory.awake, asleep=one.memory.asleep)
