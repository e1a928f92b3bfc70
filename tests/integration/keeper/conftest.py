"""Workers whose device several models share: the demo model under several names, with a budget for one awake."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import read_devices, read_heartbeats
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.devices import DeviceModel, DeviceRecord

from ...conftest import DEMO_MODEL
from ...gate import Gate
from ..supervisor.conftest import StartedWorker

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
OPTIONS = ("--device", "cpu", "--threads", "1")
# Weights of 6 MiB, a cache of 200 MiB and 128 MiB for each process: one model is awake, two sleep.
MEMORY = ("--device-memory", "640MiB", "--kv-cache-memory", "200MiB")


class SharedWorker:
    """A running ``worker start`` with several models."""

    def __init__(self, started: StartedWorker, commands: CommandConnection, namespace: str) -> None:
        self.started = started
        self._execute = commands.execute
        self._keys = Keys(namespace)

    async def await_ready(self) -> None:
        await asyncio.to_thread(self.started.await_ready)

    async def await_event(self, event: str, **fields: object) -> dict[str, object]:
        """Return the first log line of the event with these fields, waiting for it."""
        while True:
            for line in await asyncio.to_thread(lambda: self.started.events):
                if line["event"] == event and fields.items() <= line.items():
                    return line
            await asyncio.sleep(0.02)

    async def device(self) -> DeviceRecord:
        """Return the record of this worker's device, waiting for it."""
        while True:
            for device in await read_devices(self._execute, self._keys):
                if f"-{self.started.process.pid}-" in device.worker_id:
                    return device
            await asyncio.sleep(0.02)

    async def model(self, name: str) -> DeviceModel:
        return next(model for model in (await self.device()).models if model.name == name)

    async def until(self, name: str, condition: Callable[[DeviceModel], bool]) -> DeviceModel:
        """Wait until the record of a model meets the condition."""
        while not condition(model := await self.model(name)):
            await asyncio.sleep(0.02)
        return model

    async def beat(self, name: str, condition: Callable[[EngineHeartbeat], bool] = lambda _: True) -> EngineHeartbeat:
        """Return the heartbeat of a model's engine that meets the condition, waiting for it."""
        while True:
            for beat in await read_heartbeats(self._execute, self._keys):
                if beat.model == name and psutil.pid_exists(beat.worker_pid) and condition(beat):
                    return beat
            await asyncio.sleep(0.02)


class ShareDevice(Protocol):
    """Start a worker with the models of these names: ``share_device("a", "b", "--idle-sleep", "1")``.

    Args:
        words: names of one letter, and options, which have all of ``MEMORY`` or none of it.
        sleep_level: depth of their sleep. By default measured times decide, which differ on a busy machine.
    """

    def __call__(self, *words: str, sleep_level: int | str = "auto") -> Awaitable[SharedWorker]: ...


@pytest.fixture
def share_device(
    tmp_path: Path,
    commands: CommandConnection,
    redis_url: str,
    namespace: str,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ShareDevice]:
    """Return the function that starts workers, which end with the test."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    # Locks of devices are there.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[StartedWorker] = []

    async def start(*words: str, sleep_level: int | str = "auto") -> SharedWorker:
        names = [word for word in words if len(word) == 1]
        paths = [str(copy_of_model(tmp_path, name)) for name in names]
        folder = tmp_path / f"worker-{len(started)}"
        folder.mkdir()
        models = [word for path in paths for word in ("--model", path)]
        if sleep_level != "auto":
            tables = [f'[[models]]\nmodel = "{path}"\nsleep_level = {sleep_level}\n' for path in paths]
            (folder / "models.toml").write_text("".join(tables))
            models = ["--models", str(folder / "models.toml")]
        fixed = ("--namespace", namespace, "--log-format", "json", "--deterministic", "--log-stats-interval", "0")
        options = [word for word in words if word not in names]
        memory = () if "--device-memory" in options else MEMORY
        arguments = [*models, *fixed, *OPTIONS, *memory, *options]
        started.append(await asyncio.to_thread(StartedWorker, folder, arguments))
        worker = SharedWorker(started[-1], commands, namespace)
        await worker.await_ready()
        return worker

    yield start
    for worker in started:
        worker.destroy()


def copy_of_model(folder: Path, name: str) -> Path:
    """Return a folder of the demo model with this name."""
    target = folder / name
    if not target.exists():
        shutil.copytree(DEMO_MODEL, target, copy_function=os.link)
    return target


async def texts_of(client: Client, prompts: list[str], models: list[str]) -> list[str]:
    """Return the outputs of all prompts, sent together, each to the next one of the models."""
    answers = [
        client.generate(prompt, PARAMS, model=models[index % len(models)]) for index, prompt in enumerate(prompts)
    ]
    return [answer.outputs[0].text for answer in await asyncio.gather(*answers)]
