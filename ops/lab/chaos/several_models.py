"""A chaos run of several models on one device: the models, and the costs of their swaps."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
from redis.exceptions import RedisError
from safetensors.numpy import load_file, save_file

from ....shared.broker import LEASE_TTL_MS
from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_devices
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.messages.devices import DeviceModel, DeviceRecord, ModelPhase, SwapRecord
from ....shared.swap.rule import Reason, longest_wait_s
from ....shared.swap.views import SwapOptions
from ...demo.run import MODEL
from ...local.stack import LocalStack
from .options import DEMO, ChaosOptions

BAND, PATIENCE_S, MAX_SHARE = "standard", 0.5, 0.5
# One model is awake, and two sleep: a process has 128 MiB, weights 6, and a KV cache 128. Two awake ones need 524.
_MEMORY_OF_DEMOS = ("--device-memory", "520MiB", "--kv-cache-memory", "128MiB")
# Caches of others take what sleeping processes leave. The demo model's has at least 256 MiB, so it fits beside none.
_SEQS_OF_OTHERS = ("--max-num-seqs", "128")
SWAP_OPTIONS = SwapOptions(patience_s={BAND: PATIENCE_S}, max_share=MAX_SHARE)
# Relative size of the changes of weights by which the models differ.
_NOISE = 0.05
_LOOK_EVERY_S = 0.05
# Swaps after which memory is measured. In the first ones models are loaded.
_WINDOW = 10


def sharing_options(options: ChaosOptions, models: Sequence[Path]) -> list[str]:
    """Return the options of `worker start` for models that share a device; the first is named elsewhere."""
    memory = ("--device-memory", options.device_memory, *_SEQS_OF_OTHERS) if options.models else _MEMORY_OF_DEMOS
    rule = ("--patience", f"{BAND}={PATIENCE_S}", "--max-swap-share", f"{MAX_SHARE}")
    return [*memory, *rule, *(word for path in models[1:] for word in ("--model", str(path)))]


def choose_models(folder: Path, options: ChaosOptions) -> list[Path]:
    """Return the models that share a device. Those that are made are below ``folder``."""
    if not options.models:
        return make_models(folder, options.num_models)
    return [shutil.copytree(MODEL, folder / DEMO) if name == DEMO else Path(name) for name in options.models]


def make_models(folder: Path, number: int) -> list[Path]:
    """Write models that differ from the demo model and from each other, so that a mix-up would change an output."""
    weights = load_file(Path(MODEL) / "model.safetensors")
    paths: list[Path] = []
    for index in range(number):
        random = np.random.default_rng(index)
        path = shutil.copytree(MODEL, folder / f"demo{index}")
        noisy = {
            name: (values * (1 + _NOISE * random.standard_normal(values.shape))).astype(values.dtype)
            for name, values in weights.items()
        }
        save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(path)
    return paths


class SwapFigures(msgspec.Struct, kw_only=True):
    """Swaps of a run.

    Args:
        share: share of the time in which models woke or went to sleep.
        served_after_s: by model, time from the last fault to its next token; None for a model without one.
        most_awake: most models of a device that were awake at once.
        bound_s: longest time that the rule allows for that.
        early_bytes, late_bytes: sum of the least memory of each process at swaps 11 to 20 of the undisturbed run, and
            at its last 10. Pages that processes share count once.
    """

    num_swaps: int = 0
    share: float = 0.0
    most_awake: int = 0
    served_after_s: dict[str, float | None] = {}
    bound_s: float = 0.0
    early_bytes: int = 0
    late_bytes: int = 0

    @property
    def unserved(self) -> list[str]:
        """Models that were not served within the bound."""
        return [name for name, time_s in self.served_after_s.items() if time_s is None or time_s > self.bound_s]


class SwapWatch:
    """Reader of the records of devices; ``run`` until cancelled."""

    def __init__(self, stack: LocalStack, models: Sequence[str]) -> None:
        self._stack = stack
        self._models = models
        self._counts: dict[str, int] = {}
        self._last: dict[str, SwapRecord] = {}
        self._swap_s = 0.0
        self._dearest_s = 0.0
        self._most_awake = 0
        self._started_s = time.monotonic()
        self._memory: list[dict[int, int]] = []
        self._fault_s: float | None = None
        self._served_s: dict[str, float] = {}
        self.measures_memory = False
        self.records: list[DeviceRecord] = []

    async def run(self) -> None:
        commands = CommandConnection(self._stack.url)
        try:
            while True:
                with suppress(PenstockError, RedisError):
                    self.records = await read_devices(commands.execute, Keys())
                    num_swaps = self.num_swaps
                    for record in self.records:
                        self.count(record)
                    if self.measures_memory and self.num_swaps > num_swaps:
                        self._memory.append(await asyncio.to_thread(self._used_bytes))
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            await commands.close()

    @property
    def num_swaps(self) -> int:
        """Number of swaps so far, of all supervisors."""
        return sum(self._counts.values())

    def fault(self) -> None:
        """Record that a fault has ended now."""
        self._fault_s, self._served_s = time.monotonic(), {}

    def served(self, model: str) -> None:
        """Record that a subscriber received a delta of a request for a model."""
        if self._fault_s is not None:
            self._served_s.setdefault(model, time.monotonic() - self._fault_s)

    @property
    def is_settled(self) -> bool:
        """Whether all models have been served since the last fault, or one was not in time."""
        figures = self.figures()
        is_late = self._fault_s is not None and time.monotonic() - self._fault_s > figures.bound_s
        return is_late or len(self._served_s) == len(self._models)

    def figures(self) -> SwapFigures:
        """Return the figures until now."""
        devices_s = len(self._stack.workers) * (time.monotonic() - self._started_s)
        # A death adds a lease, and the start of a supervisor.
        start_s = max((worker.ready_time_s for worker in self._stack.workers), default=0.0)
        bound_s = longest_wait_s(len(self._models), self._dearest_s, SWAP_OPTIONS, BAND)
        return SwapFigures(
            num_swaps=self.num_swaps,
            share=round(self._swap_s / devices_s, 4),
            most_awake=self._most_awake,
            served_after_s={name: self._served_s.get(name) for name in self._models} if self._fault_s else {},
            bound_s=bound_s + start_s + LEASE_TTL_MS / 1000,
            early_bytes=least_bytes(self._memory[_WINDOW : 2 * _WINDOW]),
            late_bytes=least_bytes(self._memory[-_WINDOW:]),
        )

    async def wait_for(
        self, choose: Callable[[DeviceRecord, DeviceModel], bool], patience_s: float
    ) -> tuple[DeviceRecord, DeviceModel] | None:
        """Return a device and its model that ``choose`` accepts; None if none appears within ``patience_s``."""
        until_s = time.monotonic() + patience_s
        while True:
            for record in self.records:
                for model in record.models:
                    if choose(record, model):
                        return record, model
            if time.monotonic() > until_s:
                return None
            await asyncio.sleep(_LOOK_EVERY_S)

    def count(self, record: DeviceRecord) -> None:
        """Count the swaps of a device, and its awake models."""
        self._most_awake = max(self._most_awake, sum(model.phase == ModelPhase.AWAKE for model in record.models))
        # A restarted supervisor counts from 0, under another id.
        self._counts[record.device_id] = sum(swap.count for swap in record.swap_counts)
        swap = record.last_swap
        if swap is None or swap.reason == Reason.OPERATOR:
            return  # the load at its start
        if self._last.get(record.device_id) != swap:
            self._last[record.device_id] = swap
            self._dearest_s = max(self._dearest_s, swap.took_s)
            self._swap_s += swap.took_s

    def _used_bytes(self) -> dict[int, int]:
        used: dict[int, int] = {}
        for worker in self._stack.workers:
            supervisor = psutil.Process(worker.pid)
            for process in (supervisor, *supervisor.children(recursive=True)):
                with suppress(psutil.Error):
                    used[process.pid] = process.memory_full_info().pss
        return used


def least_bytes(samples: Sequence[dict[int, int]]) -> int:
    """Return the sum of the least bytes of each process that runs at the last sample.

    The KV cache of an awake model has as much memory as was used of it, which differs from sample to sample. Each model
    sleeps at one of them.
    """
    if not samples:
        return 0
    return sum(min(sample[pid] for sample in samples if pid in sample) for pid in samples[-1])
