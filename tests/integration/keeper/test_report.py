"""What a device reports to Redis while a part of Redis does not answer."""

from __future__ import annotations

import asyncio
import math

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from penstock.shared.broker import Homes
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.swap.views import SleepLevel
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.swap import SharingOptions
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.keeper import report
from penstock.worker.keeper.engine import SharedEngine
from penstock.worker.keeper.keeper import DeviceKeeper
from penstock.worker.keeper.kept_model import KeptModel
from penstock.worker.keeper.memory import ModelBytes
from penstock.worker.keeper.plan import DevicePlan, PlannedModel
from penstock.worker.keeper.report import DeviceReporter, device_id_of
from penstock.worker.supervisor.placement import Placement
from penstock.worker.supervisor.reaper import Reaper

from ...processes import DEADLINE_S

NAMES = ("a", "b")


class FailingHomes(Homes):
    """Homes of a model that are not renewed because of ``failure``, once it is set."""

    failure: Exception | None = None

    async def renew(self, *args: object, **options: object) -> None:
        if self.failure is not None:
            raise self.failure
        await super().renew(*args, **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture
async def homes(commands: CommandConnection, namespace: str) -> dict[str, FailingHomes]:
    return {name: FailingHomes(commands, Keys(namespace).model(name)) for name in NAMES}


@pytest.fixture
async def reporter(
    commands: CommandConnection, namespace: str, homes: dict[str, FailingHomes]
) -> tuple[DeviceReporter, list[KeptModel]]:
    """A reporter of two models that were awake when their homes were renewed last."""
    engines = [EngineConfig(model=name) for name in NAMES]
    configs = [
        WorkerConfig(worker_id="w", engine_id="w-0", redis_url="redis://unused", namespace=namespace, engine=engine)
        for engine in engines
    ]
    size = ModelBytes(weights=1, process=1)
    models = [
        KeptModel(
            PlannedModel(engine=engine, process={}, path=None, bytes=size),
            SharedEngine(config, Reaper(commands, config), lambda: None),
            device_id_of(config),
        )
        for engine, config in zip(engines, configs, strict=True)
    ]
    plan = DevicePlan(Placement("cpu"), 1 << 30, 0)
    keeper = DeviceKeeper(device_id_of(configs[0]), plan, models, dict(homes), SharingOptions())
    reporter = DeviceReporter(commands, configs[0], plan, keeper, dict(homes), {})
    reporter._home_states = dict.fromkeys(NAMES, (SleepLevel.AWAKE, False))
    return reporter, models


async def test_a_home_that_redis_did_not_take_is_logged_and_renewed_again(
    reporter: tuple[DeviceReporter, list[KeptModel]], homes: dict[str, FailingHomes]
) -> None:
    device, models = reporter
    homes["a"].failure = RedisConnectionError("shard 2 is away")
    with capture_logs() as events:
        await device._renew_changed()
    assert [(each["event"], each["model"], each["error"]) for each in events] == [
        ("home_not_renewed", "a", "shard 2 is away")
    ]
    demands = [await homes[name].demand() for name in NAMES]
    assert [len(demand.homes) for demand in demands] == [0, 1]
    homes["a"].failure = None
    await device._renew_changed()
    assert [home.level for home in (await homes["a"].demand()).homes] == [models[0].level]


async def test_a_change_during_a_renewal_is_renewed_immediately(
    reporter: tuple[DeviceReporter, list[KeptModel]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, models = reporter
    levels: list[SleepLevel] = []
    has_renewed_again = asyncio.Event()

    async def renew_and_change(homes: Homes, device_id: str, level: SleepLevel, *_: object, **__: object) -> None:
        levels.append(level)
        if len(levels) == 1:
            monkeypatch.setattr(KeptModel, "level", SleepLevel.AWAKE)
            device.notify()
        else:
            has_renewed_again.set()

    monkeypatch.setattr(report, "INTERVAL_S", math.inf)
    monkeypatch.setattr(Homes, "renew", renew_and_change)
    device._home_states.clear()
    renewing = asyncio.create_task(device._renew_home(models[0]))
    try:
        await asyncio.wait_for(has_renewed_again.wait(), DEADLINE_S)
    finally:
        renewing.cancel()
    assert levels == [SleepLevel.DISK, SleepLevel.AWAKE]


async def test_a_mistake_in_our_code_is_not_taken_for_an_unavailable_redis(
    reporter: tuple[DeviceReporter, list[KeptModel]], homes: dict[str, FailingHomes]
) -> None:
    homes["b"].failure = KeyError("b")
    with pytest.raises(KeyError):
        await reporter[0]._renew_changed()
