"""Access of the pages to Redis.

A ``PageSnapshot`` is created for a request, or for a tick of the watcher. It reads each value once, so two pages of
one model cost as much as one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ...producer import Client
from ...producer.background.agenda import Agenda
from ...producer.batches.batch_store import BatchStore
from ...producer.control.operations import Operations
from ...producer.control.secret_keys import OperatorKeys
from ...producer.control.usage import Prices
from ...producer.requests.model_cards import ModelCards
from ...producer.webhooks.event_store import EventStore
from ...shared.broker import Broker, DeadLetter, Queue, RequestHistory
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit
from ...shared.deployment.presence import read_devices, read_heartbeats
from ...shared.deployment.records import DeadRequest, EngineHeartbeat, ModelCard
from ...shared.errors import RedisUnavailableError, UnknownModelError
from ...shared.keys import Keys
from ...shared.messages.devices import DeviceRecord
from ...shared.partitions import Layouts, PartitionedBroker, open_dead_letter, open_history, open_queue
from ...shared.queue.stats import QueueStats
from ...shared.shards import ShardsArgument
from ...shared.values.shown import shown
from .request import ReadLog

# A page reports a model's Redis as unreachable after this time.
PATIENCE_S = 3.0
# A call retries an unreachable Redis for this time. Then the page reports it, instead of showing old values.
RETRY_FOR_S = 5.0
MAX_CACHED = 200

T = TypeVar("T")


class Source:
    """The connections of one process that shows pages, and the objects that read through them.

    Args:
        connection: connection for commands; ``close`` closes it, too.
        prices: for the costs of usage; None for none.
    """

    def __init__(
        self,
        redis_url: str,
        connection: CommandConnection,
        keys: Keys,
        shards: ShardsArgument = None,
        prices: Prices | None = None,
    ) -> None:
        self.connection = connection
        self.keys = keys
        self.prices = prices
        self.client = Client(redis_url, namespace=keys.namespace, shards=shards, retry_for_s=RETRY_FOR_S)
        self.layouts = Layouts(connection, keys)
        self.operations = Operations(connection, keys)
        self.audit = Audit(connection, keys)
        self.operator_keys = OperatorKeys(connection, keys)
        self.events = EventStore(connection, keys, Agenda(connection, keys))
        self.batches = BatchStore(redis_url, namespace=keys.namespace, retry_for_s=RETRY_FOR_S)
        # Parked requests that were read: by model, then by id and time.
        self.parked: dict[str, dict[tuple[str, float], DeadRequest]] = {}
        # Logs of requests that are shown, by model and id.
        self.logs: OrderedDict[tuple[str, str], ReadLog] = OrderedDict()
        self._cache: OrderedDict[Any, tuple[float, Any]] = OrderedDict()

    async def open(self) -> None:
        """Connect.

        Raises:
            RedisUnavailableError, RedisUnsupportedError: as ``Client.open``.
        """
        await self.client.open()
        await self.batches.open()

    async def close(self) -> None:
        """Disconnect. A second call does nothing."""
        await self.client.close()
        await self.batches.close()
        await self.connection.close()

    async def cached(self, key: Any, max_age_s: float, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``read``, cached under ``key`` for ``max_age_s``; for expensive or static data."""
        entry = self._cache.get(key)
        if entry is None or time.monotonic() - entry[0] > max_age_s:
            entry = self._cache[key] = (time.monotonic(), await read())
            self._cache.move_to_end(key)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return entry[1]

    def clear_cache(self) -> None:
        """Drop all cached values, since an operator has made a change and wants to see its effect."""
        self._cache.clear()

    async def queue(self, model: str) -> Queue:
        """Return the queue of a model over all its partitions."""
        return await open_queue(self.connection, self.keys, model)

    async def dead(self, model: str) -> DeadLetter:
        """Return the dead letter of a model over all its partitions."""
        return await open_dead_letter(self.connection, self.keys, model)

    async def brokers(self, model: str) -> Sequence[Broker]:
        """Return a broker for each partition of a model."""
        num = (await self.layouts.recent(model)).num_known
        return [Broker(self.connection, self.keys.model(model, number), number) for number in range(num)]

    async def history(self, model: str) -> RequestHistory:
        """Return the history of a model's requests over all its partitions."""
        return await open_history(self.connection, self.keys, model)

    async def broker_of(self, model: str, request_id: str) -> Broker:
        """Return the broker of the partition that has a request."""
        return await PartitionedBroker(self.connection, self.keys, model, self.layouts).find(request_id)


class PageSnapshot:
    """State of the deployment at one time. Each value is read when it is first requested."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = time.time()
        self._read: dict[Any, asyncio.Task[Any]] = {}

    async def once(self, key: Any, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``read``, which is called once per ``key``."""
        if key not in self._read:
            self._read[key] = asyncio.ensure_future(read())
        return await asyncio.shield(self._read[key])

    async def models(self) -> dict[str, ModelCard]:
        """Return the models that workers have served or that requests wait for, by name."""
        served, awaited = await self.once("models", self._read_models)
        return {name: served.get(name) or ModelCard(model=name) for name in sorted({*served, *awaited})}

    async def served_models(self) -> list[str]:
        """Return the names of the models that workers have served."""
        served, _ = await self.once("models", self._read_models)
        return sorted(served)

    async def _read_models(self) -> tuple[dict[str, ModelCard], list[str]]:
        cards = ModelCards(self.source.connection, self.source.keys, default=None, wait_for_model=True)
        return await cards.read_with_awaited()

    async def check_model(self, model: str) -> ModelCard:
        """Return the card of a model.

        Raises:
            UnknownModelError: no worker has ever served it.
        """
        card = (await self.models()).get(model)
        if card is None:
            raise UnknownModelError(f"no worker has ever served model {shown(model)} on this Redis")
        return card

    async def engines(self) -> list[EngineHeartbeat]:
        """Return the heartbeats of all engines, sorted by engine id."""
        source = self.source
        return await self.once("engines", lambda: read_heartbeats(source.connection.execute, source.keys))

    async def devices(self) -> list[DeviceRecord]:
        """Return the devices that several models share, sorted by id."""
        source = self.source
        return await self.once("devices", lambda: read_devices(source.connection.execute, source.keys))

    async def queue(self, model: str) -> Queue:
        """Return the queue of a model."""
        return await self.once(("queue", model), lambda: self.source.queue(model))

    async def stats(self, model: str) -> QueueStats | None:
        """Return the totals of a model's queue; None if its Redis is unreachable."""

        async def read() -> QueueStats | None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await (await self.queue(model)).stats()
            except (TimeoutError, RedisUnavailableError):
                return None

        return await self.once(("stats", model), read)

    async def num_dead(self, model: str) -> int:
        """Return the number of parked requests of a model; 0 if its Redis is unreachable."""

        async def read() -> int:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await (await self.source.dead(model)).count()
            except (TimeoutError, RedisUnavailableError):
                return 0

        return await self.once(("num_dead", model), read)

    async def close(self) -> None:
        """Cancel pending reads and wait for them."""
        pending = [task for task in self._read.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._read.values(), return_exceptions=True)


async def together(*reads: Awaitable[Any]) -> Sequence[Any]:
    """Return the results of several concurrent reads."""
    return await asyncio.gather(*reads)
