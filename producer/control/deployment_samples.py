"""The queues and engines of all models as metrics, read within a bounded time however slow Redis is."""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.deployment.heartbeats import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.metrics import SERVING, Sample, engines_samples, queue_samples
from ...shared.queue.stats import QueueStats
from ..requests.model_cards import ModelCards
from .deployment import stats_soon

# Prometheus waits 10 s for all of a scrape.
PATIENCE_S = 2.0


class ModelState:
    """A model's engines and its queue. The queue is None if its Redis does not answer."""

    def __init__(self, model: str, queue: QueueStats | None, engines: list[EngineHeartbeat]) -> None:
        self.model = model
        self.queue = queue
        self.engines = engines

    @property
    def num_serving(self) -> int:
        return sum(engine.state in SERVING for engine in self.engines)

    def samples(self) -> list[Sample]:
        """Return the model's state as metrics."""
        queue = [] if self.queue is None else [*queue_samples(self.queue)]
        return [*queue, *engines_samples(self.engines)]


async def read_models(connection: CommandConnection, keys: Keys) -> list[ModelState] | None:
    """Return the state of each model; None if the home Redis, which lists the models, does not answer."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            cards, awaited = await ModelCards(connection, keys, default=None, wait_for_model=True).read_with_awaited()
            engines = await read_heartbeats(connection.execute, keys)
    except (TimeoutError, PenstockError, RedisError):
        return None
    # Includes awaited models, so that workers can be scaled up from zero.
    models = [*cards, *awaited]
    queues = await asyncio.gather(*(_stats(connection, keys, model) for model in models))
    return [
        ModelState(model, queue, [engine for engine in engines if engine.model == model])
        for model, queue in zip(models, queues, strict=True)
    ]


async def _stats(connection: CommandConnection, keys: Keys, model: str) -> QueueStats | None:
    try:
        return await stats_soon(connection, keys, model, PATIENCE_S)
    except RedisError:
        return None
