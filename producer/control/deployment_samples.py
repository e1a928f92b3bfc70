"""All models' queues and engines as metrics, within a bounded time, whatever Redis does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from redis.exceptions import RedisError

from ...shared.errors import PenstockError
from ...shared.metrics import SERVING, Sample, engine_samples, queue_samples
from ...shared.queue_stats import QueueStats
from ...shared.records import EngineHeartbeat
from ..client import Client

T = TypeVar("T")

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
        return [*queue, *(sample for engine in self.engines for sample in engine_samples(engine))]


async def read_models(client: Client) -> list[ModelState] | None:
    """Return the state of each model; None while home, the Redis that knows which there are, does not answer."""
    models = await _in_time(client.models())
    if models is None:
        return None
    return [*await asyncio.gather(*(_read_model(client, model) for model in models))]


async def _read_model(client: Client, model: str) -> ModelState:
    queue, engines = await asyncio.gather(
        _in_time(client.queue_stats(model, tenants=False)), _in_time(client.engines(model))
    )
    return ModelState(model, queue, engines or [])


async def _in_time(work: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await work
    except (TimeoutError, PenstockError, RedisError):
        return None
