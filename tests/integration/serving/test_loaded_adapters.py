"""What a worker process says of the adapters of its core, and has loaded at the start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.control.model import AddLora, LoraChanged, PinLora
from penstock.shared.errors import EngineStateError
from penstock.shared.keys import Keys
from penstock.shared.lora.registry import AdapterRecord, AdapterRegistry
from penstock.shared.messages.core import EngineCoreOutputs
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.core.client import CoreClient
from penstock.worker.serving.partitions.served_partitions import ServedPartitions
from penstock.worker.serving.reporting import heartbeat
from penstock.worker.serving.reporting.heartbeat import Heartbeat, LoadedAdapters

from ...processes import DEADLINE_S

CATS, DOGS = "c" * 64, "d" * 64


class Core:
    """Answers calls, and refuses to load what it is told to."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Any] = asyncio.Queue()
        self.refuses = ""

    async def call(self, call: AddLora | PinLora) -> LoraChanged:
        self.calls.put_nowait(call)
        if isinstance(call, AddLora) and call.lora_request.lora_name == self.refuses:
            raise EngineStateError("no room")
        return LoraChanged(True)


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
async def loaded(commands: CommandConnection, broker: Broker, namespace: str, core: Core) -> LoadedAdapters:
    config = WorkerConfig(
        worker_id="w", engine_id="e0", redis_url="", engine=EngineConfig(model="m"), namespace=namespace
    )
    parts = cast(ServedPartitions, [SimpleNamespace(broker=broker)])
    return LoadedAdapters(config, commands, parts, cast(CoreClient, core), Heartbeat(config, commands))


async def said(commands: CommandConnection, broker: Broker) -> set[str]:
    return {one.decode() for one in await commands.execute("SMEMBERS", broker.keys.prefix + "adapters_of:e0")}


async def until_said(commands: CommandConnection, broker: Broker, digests: set[str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await said(commands, broker) != digests:
            await asyncio.sleep(0.01)


async def test_loaded_adapters_are_reported_at_each_change_and_removed_at_the_end(
    commands: CommandConnection, broker: Broker, loaded: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "PATIENCE_S", 60.0)
    running = asyncio.create_task(loaded.run())
    for digests in ([CATS], [CATS, DOGS], [DOGS], []):
        loaded.update(EngineCoreOutputs(lora_digests=digests))
        loaded.update(EngineCoreOutputs())  # a step that changed nothing
        await until_said(commands, broker, set(digests))
    loaded.update(EngineCoreOutputs(lora_digests=[CATS]))
    await until_said(commands, broker, {CATS})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await loaded.leave()
    assert await said(commands, broker) == set()


async def test_loaded_adapters_are_reported_again_after_data_loss(
    commands: CommandConnection, broker: Broker, loaded: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "REPORT_EVERY_S", 0.05)
    running = asyncio.create_task(loaded.run())
    loaded.update(EngineCoreOutputs(lora_digests=[CATS]))
    await until_said(commands, broker, {CATS})
    await commands.execute("DEL", broker.keys.prefix + "adapters_of:e0")
    await until_said(commands, broker, {CATS})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_pinned_adapters_of_the_model_are_loaded_at_the_start(
    commands: CommandConnection, namespace: str, loaded: LoadedAdapters, core: Core
) -> None:
    registry = AdapterRegistry(commands, Keys(namespace))
    for name, model in (("a", "m"), ("b", "m"), ("other", "n"), ("c", "m")):
        record = AdapterRecord(name=name, model=model, digest=(name[0] * 64), path=f"/{name}")
        await registry.register(record)
        if name != "b":
            await registry.pin(name, "", pinned=True)
    core.refuses = "a"
    running = asyncio.create_task(loaded.run())
    async with asyncio.timeout(DEADLINE_S):
        calls = [await core.calls.get() for _ in range(3)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert core.calls.empty()
    told = [c.lora_request.lora_name if isinstance(c, AddLora) else c.lora_id for c in calls]
    number = (await registry.find("c", "")).number  # pyright: ignore[reportOptionalMemberAccess]
    assert told == ["a", "c", number]
