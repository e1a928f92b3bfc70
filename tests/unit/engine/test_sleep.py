"""Sleep and wake-up, with parts that only note their calls."""

from __future__ import annotations

import pytest

from penstock.shared.control.engine import SleepState
from penstock.shared.errors import EngineCallError, ModelLoadError
from penstock.worker.engine.control.sleep import EngineSleep, SleepableCache


class Part:
    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events
        self.failure: Exception | None = None

    def release(self, level: int) -> None:
        self._events.append(f"{self._name} released {level}")

    def restore(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._events.append(f"{self._name} restored")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def parts(events: list[str]) -> dict[str, Part]:
    return {tag: Part(tag, events) for tag in ("weights", "kv_cache")}


@pytest.fixture
def sleep(parts: dict[str, Part], events: list[str]) -> EngineSleep:
    return EngineSleep(parts, on_awake=lambda: events.append("awake"))


def test_asleep_it_is_put_to_sleep_only_deeper(sleep: EngineSleep, events: list[str]) -> None:
    assert sleep.state == SleepState()
    assert not sleep.state.is_sleeping
    for level in (1, 1, 2, 1):
        sleep.sleep(level)
    assert events == ["weights released 1", "kv_cache released 1", "weights released 2", "kv_cache released 2"]
    assert sleep.state == SleepState(2, ["weights", "kv_cache"])


def test_it_is_awake_when_all_is_back(sleep: EngineSleep, events: list[str]) -> None:
    sleep.wake_up(None)
    assert events == []
    sleep.sleep(1)
    del events[:]
    sleep.wake_up(["weights"])
    assert sleep.state == SleepState(1, ["kv_cache"])
    assert (sleep.is_asleep("weights"), sleep.is_asleep("kv_cache")) == (False, True)
    sleep.wake_up(["weights", "kv_cache"])
    assert sleep.state == SleepState()
    assert events == ["weights restored", "kv_cache restored", "awake"]
    sleep.wake_up(None)
    assert events[3:] == []


def test_half_awake_it_can_be_put_to_sleep_again(sleep: EngineSleep, events: list[str]) -> None:
    sleep.sleep(1)
    sleep.wake_up(["kv_cache"])
    del events[:]
    sleep.sleep(1)
    assert events == ["kv_cache released 1"]


def test_an_engine_that_cannot_be_restored_stays_asleep(
    sleep: EngineSleep, parts: dict[str, Part], events: list[str]
) -> None:
    sleep.sleep(2)
    parts["weights"].failure = OSError("the folder is gone")
    with pytest.raises(EngineCallError, match=r"because weights could not be restored: OSError: the folder is gone"):
        sleep.wake_up(None)
    parts["weights"].failure = ModelLoadError("the folder is gone")
    with pytest.raises(ModelLoadError, match=r"^the folder is gone"):
        sleep.wake_up(None)
    assert sleep.state == SleepState(2, ["weights", "kv_cache"])
    parts["weights"].failure = None
    sleep.wake_up(None)
    assert not sleep.state.is_sleeping
    assert events[-3:] == ["weights restored", "kv_cache restored", "awake"]


@pytest.mark.parametrize("failing", ["kv_cache", "the preparation to compute"])
def test_parts_that_were_restored_are_released_when_another_fails(
    parts: dict[str, Part], events: list[str], failing: str
) -> None:
    last = Part(failing, events)
    sleep = EngineSleep(parts, last.restore)
    sleep.sleep(1)
    del events[:]
    parts.get(failing, last).failure = MemoryError("no room")
    with pytest.raises(EngineCallError, match=f"still sleeps, because {failing} could not be restored: MemoryError"):
        sleep.wake_up(None)
    assert events[-2:] == ["weights released 1", "kv_cache released 1"]
    assert sleep.state == SleepState(1, ["weights", "kv_cache"])
    parts.get(failing, last).failure = None
    sleep.wake_up(None)
    assert sleep.state == SleepState()


def test_a_part_that_was_awake_before_stays_awake(
    sleep: EngineSleep, parts: dict[str, Part], events: list[str]
) -> None:
    sleep.sleep(1)
    sleep.wake_up(["weights"])
    del events[:]
    parts["kv_cache"].failure = MemoryError()
    with pytest.raises(EngineCallError):
        sleep.wake_up(None)
    assert events == ["kv_cache released 1"]
    assert sleep.state == SleepState(1, ["kv_cache"])


def test_a_cache_without_memory_stays_empty() -> None:
    layers: list[str] = []

    def allocate() -> None:
        layers.append("first")
        raise MemoryError

    sleep = EngineSleep({"kv_cache": SleepableCache(layers.clear, allocate)})
    sleep.sleep(1)
    with pytest.raises(EngineCallError):
        sleep.wake_up(None)
    assert layers == []
    assert sleep.is_asleep("kv_cache")
