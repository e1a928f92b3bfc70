"""What a keeper makes of the demand for a model, and of its failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.shared.broker import Demand, Home
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import EngineDeadError
from penstock.shared.swap.views import ModelView, SleepLevel, SwapOptions
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.keeper.engine import ModelStartError, SharedEngine
from penstock.worker.keeper.kept_model import MAX_FAILURES, KeptModel
from penstock.worker.keeper.memory import ModelBytes
from penstock.worker.keeper.plan import PlannedModel
from penstock.worker.supervisor.reaper import Reaper

WAITING = {"interactive": 3.0}


@pytest.fixture
async def model(commands: CommandConnection) -> KeptModel:
    engine = EngineConfig(model="m")
    config = WorkerConfig(worker_id="w", engine_id="w-0", redis_url="redis://unused", engine=engine)
    planned = PlannedModel(engine=engine, process={}, path=None, bytes=ModelBytes(weights=1, process=1))
    shared = SharedEngine(config, Reaper(commands, config), lambda: None)
    return KeptModel(planned, shared, "here", SwapOptions())


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


async def test_failures_of_a_model_break_it_soon_and_those_from_outside_late(model: KeptModel) -> None:
    now_s = asyncio.get_running_loop().time()
    killed = ModelStartError("it was killed", is_external=True)
    for error in (killed, EngineDeadError("the engine core has exited")) * 4:
        model.record_failure(error, now_s)
    assert not model.broken_reason
    for _ in range(2):
        model.record_failure(killed, now_s)
    assert model.broken_reason == "it was killed"
    model.repair()
    for _ in range(MAX_FAILURES):
        assert not model.broken_reason
        model.record_failure(ModelStartError("a file is damaged"), now_s)
    assert model.broken_reason == "a file is damaged"
