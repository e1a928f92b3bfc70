"""What the pages read of Redis: each thing once a moment, however many pages and tabs show it.

A ``Moment`` is made for a request, or for a tick of the watcher. What it has read it gives to whoever asks again, so
two pages of one model cost what one costs.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ...producer import Client
from ...producer.agenda import Agenda
from ...producer.batches.batch_store import BatchStore
from ...producer.control.operations import Operations
from ...producer.operator_keys import OperatorKeys
from ...producer.requests.model_cards import ModelCards
from ...producer.webhooks.event_store import EventStore
from ...shared.broker import Broker, DeadLetter, Queue, RequestHistory
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import Audit
from ...shared.deployment.heartbeats import read_heartbeats
from ...shared.deployment.records import DeadRequest, EngineHeartbeat, ModelCard
from ...shared.errors import RedisUnavailableError, UnknownModelError
from ...shared.keys import Keys
from ...shared.partitions import Layouts, PartitionedBroker, open_dead_letter, open_history, open_queue
from ...shared.queue.stats import QueueStats
from ...shared.shards import ShardsArgument
from ...shared.values.shown import shown
from .read_log import ReadLog

# The page of a model whose Redis is away says so after this.
PATIENCE_S = 3.0
# So long a call waits for a Redis that is away: then the page says so, rather than show figures of before.
RETRY_FOR_S = 5.0
MOST_KEPT = 200

T = TypeVar("T")


class Source:
    """The connections of one process that shows figures, and what reads by them.

    Args:
        connection: of commands; ``close`` closes it, too.
    """

    def __init__(
        self, redis_url: str, connection: CommandConnection, keys: Keys, shards: ShardsArgument = None
    ) -> None:
        self.connection = connection
        self.keys = keys
        self.client = Client(redis_url, namespace=keys.namespace, shards=shards, retry_for_s=RETRY_FOR_S)
        self.layouts = Layouts(connection, keys)
        self.operations = Operations(connection, keys)
        self.audit = Audit(connection, keys)
        self.operator_keys = OperatorKeys(connection, keys)
        self.events = EventStore(connection, keys, Agenda(connection, keys))
        self.batches = BatchStore(redis_url, namespace=keys.namespace, retry_for_s=RETRY_FOR_S)
        # By model: parked requests that were read, by id and time.
        self.parked: dict[str, dict[tuple[str, float], DeadRequest]] = {}
        # Logs of requests that are looked at, by model and id.
        self.logs: OrderedDict[tuple[str, str], ReadLog] = OrderedDict()
        self._kept: OrderedDict[Any, tuple[float, Any]] = OrderedDict()

    async def open(self) -> None:
        """Connect.

        Raises:
            RedisUnavailableError, RedisUnsupportedError: as ``Client.open``.
        """
        await self.client.open()
        await self.batches.open()

    async def close(self) -> None:
        """Disconnect; doing it again does nothing."""
        await self.client.close()
        await self.batches.close()
        await self.connection.close()

    async def kept(self, key: Any, max_age_s: float, read: Callable[[], Awaitable[T]]) -> T:
        """Return what ``read`` returned under ``key`` at most ``max_age_s`` ago: for what is dear or changes slowly."""
        found = self._kept.get(key)
        if found is None or time.monotonic() - found[0] > max_age_s:
            found = self._kept[key] = (time.monotonic(), await read())
            self._kept.move_to_end(key)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return found[1]

    def forget_kept(self) -> None:
        """Read anew what was kept: somebody has changed something, and looks at what has come of it."""
        self._kept.clear()

    async def queue(self, model: str) -> Queue:
        """The queue of a model, of all its partitions."""
        return await open_queue(self.connection, self.keys, model)

    async def dead(self, model: str) -> DeadLetter:
        """The dead letter of a model, of all its partitions."""
        return await open_dead_letter(self.connection, self.keys, model)

    async def brokers(self, model: str) -> Sequence[Broker]:
        """One for each partition of a model."""
        num = (await self.layouts.recent(model)).num_known
        return [Broker(self.connection, self.keys.model(model, number), number) for number in range(num)]

    async def history(self, model: str) -> RequestHistory:
        """What requests of a model have lived through, of all its partitions."""
        return await open_history(self.connection, self.keys, model)

    async def broker_of(self, model: str, request_id: str) -> Broker:
        """That of the partition that knows a request."""
        return await PartitionedBroker(self.connection, self.keys, model, self.layouts).find(request_id)


class Moment:
    """What is true now, read when it is first asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = time.time()
        self._read: dict[Any, asyncio.Task[Any]] = {}

    async def once(self, key: Any, read: Callable[[], Awaitable[T]]) -> T:
        """Return what ``read`` returned when this was first asked for under ``key``."""
        if key not in self._read:
            self._read[key] = asyncio.ensure_future(read())
        return await asyncio.shield(self._read[key])

    async def models(self) -> dict[str, ModelCard]:
        """All models that workers have served or that requests wait for, by name."""
        found, awaited = await self.once("models", self._read_models)
        return {name: found.get(name) or ModelCard(model=name) for name in sorted({*found, *awaited})}

    async def served_models(self) -> list[str]:
        """The names that workers have served."""
        found, _ = await self.once("models", self._read_models)
        return sorted(found)

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
        """Heartbeats of all engines, by engine id."""
        source = self.source
        return await self.once("engines", lambda: read_heartbeats(source.connection.execute, source.keys))

    async def queue(self, model: str) -> Queue:
        """The queue of a model."""
        return await self.once(("queue", model), lambda: self.source.queue(model))

    async def stats(self, model: str) -> QueueStats | None:
        """The sums of a model's queue; None where the Redis that holds it is away."""

        async def read() -> QueueStats | None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await (await self.queue(model)).stats()
            except (TimeoutError, RedisUnavailableError):
                return None

        return await self.once(("stats", model), read)

    async def num_dead(self, model: str) -> int:
        """How many requests of a model are parked."""

        async def read() -> int:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await (await self.source.dead(model)).count()
            except (TimeoutError, RedisUnavailableError):
                return 0

        return await self.once(("num_dead", model), read)

    async def close(self) -> None:
        """Wait for what is still being read, whatever comes of it."""
        pending = [task for task in self._read.values() if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._read.values(), return_exceptions=True)


async def together(*reads: Awaitable[Any]) -> Sequence[Any]:
    """Wait for several reads at once."""
    return await asyncio.gather(*reads)
