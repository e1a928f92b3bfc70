"""All models' queues and engines as metrics, within a bounded time, whatever Redis does."""

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
    """One model: its queue, None where the Redis that holds it does not answer, and its engines."""

    def __init__(self, model: str, queue: QueueStats | None, engines: list[EngineHeartbeat]) -> None:
        self.model = model
        self.queue = queue
        self.engines = engines

    @property
    def num_serving(self) -> int:
        return sum(engine.state in SERVING for engine in self.engines)

    def samples(self) -> list[Sample]:
        """Return all that is known as metrics."""
        queue = [] if self.queue is None else [*queue_samples(self.queue)]
        return [*queue, *engines_samples(self.engines)]


async def read_models(connection: CommandConnection, keys: Keys) -> list[ModelState] | None:
    """Return the state of each model; None while home, the Redis that knows which there are, does not answer."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            cards, awaited = await ModelCards(connection, keys, default=None, wait_for_model=True).read_with_awaited()
            engines = await read_heartbeats(connection.execute, keys)
    except (TimeoutError, PenstockError, RedisError):
        return None
    # Also those that no worker has served yet, so that workers can be scaled from none.
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
