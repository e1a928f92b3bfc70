"""What a keeper makes of the demand for a model, and of its failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.shared.broker import Demand, Home
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ModelBrokenError, ModelTooLargeError
from penstock.shared.messages.supervision import LOAD_TIMED_OUT, STALLED
from penstock.shared.process.children import MAX_DELAY_S
from penstock.shared.swap.views import ModelView, SleepLevel
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.keeper import engine as keeper_engine
from penstock.worker.keeper.costs import Costs
from penstock.worker.keeper.engine import ModelStartError, SharedEngine, start_error
from penstock.worker.keeper.kept_model import MAX_OWN_FAILURES, KeptModel
from penstock.worker.keeper.memory import ModelBytes
from penstock.worker.keeper.plan import PlannedModel
from penstock.worker.supervisor.reaper import Reaper
from penstock.worker.supervisor.restart import Death

WAITING = {"interactive": 3.0}


@pytest.fixture
async def model(commands: CommandConnection) -> KeptModel:
    engine = EngineConfig(model="m")
    config = WorkerConfig(worker_id="w", engine_id="w-0", redis_url="redis://unused", engine=engine)
    planned = PlannedModel(engine=engine, process={}, path=None, bytes=ModelBytes(weights=1, process=1))
    shared = SharedEngine(config, Reaper(commands, config), lambda: None)
    return KeptModel(planned, shared, "here")


def view(model: KeptModel, demand: Demand, now_s: float = 1000.0) -> ModelView:
    model.demand = demand
    return model.rule_view(now_s)


async def test_a_model_with_enough_engines_on_other_devices_is_not_woken(model: KeptModel) -> None:
    def can_wake(**fields: Any) -> bool:
        return view(model, Demand(oldest_age_s=WAITING, **fields)).can_wake

    assert can_wake()
    assert can_wake(grants=("here",))
    assert not can_wake(grants=("there",))
    assert not can_wake(num_engines=1)
    # Its engine there has just woken, and claims in a moment.
    assert not can_wake(homes=(Home(device="there", level=SleepLevel.AWAKE, wake_s=1.0),))


async def test_a_model_whose_engines_elsewhere_are_full_for_long_is_woken_here_too(model: KeptModel) -> None:
    late = Demand(num_engines=1, oldest_age_s={"interactive": 15.0})
    seen = view(model, late, 1000.0)
    assert (seen.can_wake, seen.is_elsewhere, model.num_wanted, model.needed_since_s) == (True, True, 2, 1000.0)
    view(model, late, 1001.0)
    assert model.needed_since_s == 1000.0
    view(model, Demand(), 1002.0)
    assert model.needed_since_s is None


async def test_a_turn_on_another_device_counts_like_one_here(model: KeptModel) -> None:
    backlog = Demand(num_engines=1, oldest_age_s={"interactive": 50.0})
    view(model, backlog, 1000.0)
    left = view(model, Demand(oldest_age_s={"interactive": 51.0}), 1001.0)
    assert left.standing_s(1001.0) == {"interactive": 1.0}


async def test_the_first_load_is_expected_to_take_as_long_as_those_of_other_models(model: KeptModel) -> None:
    other = Costs()
    assert other.wake_s(SleepLevel.DISK, 10**9) == pytest.approx(2.0)
    model.costs.record_wake(SleepLevel.DISK, 40.0)
    other.slowness = model.load_slowness
    assert other.wake_s(SleepLevel.DISK, 10**9) == pytest.approx(80.0)


async def test_own_failures_break_a_model_and_those_from_outside_only_delay_it(model: KeptModel) -> None:
    now_s = asyncio.get_running_loop().time()
    for _ in range(20):
        model.record_failure(ModelStartError("it was killed", is_external=True), now_s)
    assert not model.broken_reason
    assert model.is_backing_off(now_s + MAX_DELAY_S - 0.1)
    assert not model.is_backing_off(now_s + MAX_DELAY_S)
    for _ in range(MAX_OWN_FAILURES):
        assert not model.broken_reason
        model.record_failure(ModelStartError("a file is damaged"), now_s)
    assert model.broken_reason == "a file is damaged"
    assert isinstance(model.broken_error, ModelBrokenError)
    model.renew(weight_bytes=2)
    assert (model.broken_reason, model.bytes.weights) == ("", 2)
    assert not model.is_backing_off(now_s)
    # A second attempt would have no more memory.
    model.record_failure(ModelTooLargeError("m does not fit"), now_s)
    assert isinstance(model.broken_error, ModelTooLargeError)


@pytest.mark.parametrize("code", [STALLED, LOAD_TIMED_OUT])
async def test_a_stall_on_a_busy_machine_breaks_no_model(
    model: KeptModel, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(keeper_engine, "is_overloaded", lambda: True)
    for _ in range(2 * MAX_OWN_FAILURES):
        model.record_failure(start_error(Death("it said nothing", code=code)), 0.0)
    assert not model.broken_reason
    # What is damaged is damaged on a busy machine, too.
    assert isinstance(damage := start_error(Death("a file is damaged")), ModelStartError)
    assert not damage.is_external
    monkeypatch.setattr(keeper_engine, "is_overloaded", lambda: False)
    for _ in range(MAX_OWN_FAILURES):
        model.record_failure(start_error(Death("it said nothing", code=code)), 0.0)
    assert model.broken_reason == "it said nothing"


class CrashingAsleep(SharedEngine):
    """An engine whose loads succeed, and whose sleeping process dies in each wake."""

    level: int | None = None

    @property
    def sleep_level(self) -> int | None:
        return self.level

    async def load(self, cache_bytes: int | None) -> None:
        self.level = 0

    async def wake_up(self) -> None:
        self.level = None
        raise start_error(Death("the engine core was killed by SIGSEGV"))


async def test_a_model_that_crashes_in_each_wake_but_loads_sleeps_on_disk(
    model: KeptModel, commands: CommandConnection
) -> None:
    config = model.engine.config
    model.engine = engine = CrashingAsleep(config, Reaper(commands, config), lambda: None)
    for num_wakes in range(MAX_OWN_FAILURES):
        assert model.sleeps_on_disk is False, num_wakes
        await model.wake_or_load(1)
        engine.level = 2
        with pytest.raises(ModelStartError):
            await model.wake_or_load(1)
    await model.wake_or_load(1)
    # It is served, by loads.
    assert (model.sleeps_on_disk, model.broken_reason) == (True, "")
    model.renew(weight_bytes=2)
    assert not model.sleeps_on_disk
