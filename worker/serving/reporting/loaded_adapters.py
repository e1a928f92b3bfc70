"""Report the adapters that the core has loaded, which claims and heartbeats use, and load pinned ones at the start."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from ....shared.broker.engine_calls import LOADED_TTL_MS, report_loaded
from ....shared.connection import CommandConnection
from ....shared.control.model import AddLora, PinLora
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.lora.registry import AdapterRecord, AdapterRegistry
from ....shared.messages.core import EngineCoreOutputs
from ...config.worker_config import WorkerConfig
from ..core.client import CoreClient
from ..partitions.served_partitions import ServedPartition, ServedPartitions
from .heartbeat import Heartbeat

REPORT_EVERY_S = LOADED_TTL_MS / 3000
# A partition whose Redis is unreachable gets the report in the next round.
PATIENCE_S = 1.0

log = structlog.get_logger()


class LoadedAdapters:
    """Reporter of loaded adapters. Its collaborators belong to the ``WorkerService``.

    Call ``update`` with the core's outputs, ``run`` until cancelled, then ``leave``.
    """

    def __init__(
        self,
        config: WorkerConfig,
        connection: CommandConnection,
        parts: ServedPartitions,
        core: CoreClient,
        heartbeat: Heartbeat,
    ) -> None:
        self._engine_id = config.engine_id
        self._model = config.engine.model_name
        self._connection = connection
        self._registry = AdapterRegistry(connection, Keys(config.namespace))
        self._parts = parts
        self._core = core
        self._heartbeat = heartbeat
        self._has_changed = asyncio.Event()
        self._has_reported = False

    def update(self, outputs: EngineCoreOutputs) -> None:
        """Record which adapters are loaded, if the outputs contain it."""
        if outputs.lora_digests is not None:
            self._heartbeat.lora_digests = outputs.lora_digests
            self._has_changed.set()

    async def run(self) -> None:
        """Load pinned adapters, and report all loaded ones at each change and every ``REPORT_EVERY_S``."""
        loading = asyncio.create_task(self._load_pinned())
        try:
            while True:
                self._has_changed.clear()
                if self._heartbeat.lora_digests or self._has_reported:
                    await self._report(self._heartbeat.lora_digests)
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_EVERY_S):
                        await self._has_changed.wait()
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def leave(self) -> None:
        """Report that no adapter is loaded, so that no requests wait for this engine. Otherwise the report expires."""
        if self._has_reported:
            await self._report([])

    async def _report(self, digests: list[str]) -> None:
        self._has_reported = True
        await asyncio.gather(*(self._report_to(part, digests) for part in self._parts))

    async def _report_to(self, part: ServedPartition, digests: list[str]) -> None:
        with suppress(TimeoutError, PenstockError):  # without the report, any engine may claim the requests
            async with asyncio.timeout(PATIENCE_S):
                await report_loaded(self._connection, part.broker.keys, self._engine_id, digests)

    async def _load_pinned(self) -> None:
        records = await self._registry.read(self._model)
        for record in {record.digest: record for record in records if record.pinned}.values():
            await self._load(record)

    async def _load(self, record: AdapterRecord) -> None:
        """Load and pin an adapter. A failure is only logged, since requests that use the adapter report it too."""
        try:
            await self._core.call(AddLora(record.request()))
            await self._core.call(PinLora(record.number))
        except PenstockError as error:
            log.warning("pinned_adapter_not_loaded", adapter=record.name, digest=record.digest, error=str(error))
