"""Add the counts of an engine to the time series of its model, as differences."""

from __future__ import annotations

import asyncio
import uuid

import msgspec
import structlog
from redis.exceptions import RedisError

from ....shared.broker.series import HISTOGRAMS, SeriesStore, TenantPoint, bucket_amounts
from ....shared.broker.writes import STATE_OF
from ....shared.errors import PenstockError
from ....shared.messages.outcome import FinishReason
from ....shared.queue.request_state import RequestState
from ....shared.stats.engine import EngineStats
from .engine_meter import EngineMeter

INTERVAL_S = 10.0
LAST_TIMEOUT_S = 1.0
# Per interval, this many tenants are written separately: those with the most tokens.
MAX_TENANTS = 100

log = structlog.get_logger()


class SeriesWriter:
    """Writer of one engine process. If the process dies, only the counts since its last write are lost."""

    def __init__(self, store: SeriesStore, meter: EngineMeter) -> None:
        self._store = store
        self._meter = meter
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._written = EngineStats()

    async def run(self) -> None:
        """Write every ``INTERVAL_S`` until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.add()
            except (PenstockError, RedisError) as error:
                log.warning("series_not_written", error=str(error))

    async def add_last(self) -> None:
        """Write the counts so far, within ``LAST_TIMEOUT_S``, so that an unreachable Redis does not delay the exit."""
        try:
            async with asyncio.timeout(LAST_TIMEOUT_S):
                await self.add()
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("series_not_written", error=str(error) or "Redis does not answer")

    async def add(self) -> None:
        """Write the counts since the last write."""
        now = msgspec.convert(msgspec.to_builtins(self._meter.stats), EngineStats)
        tenants = self._meter.pop_tenants()
        amounts = _difference(now, self._written)
        self._written = now
        amounts["tokens_out"] = sum(point.tokens_out for point in tenants.values())
        amounts = {name: amount for name, amount in amounts.items() if amount}
        if amounts or tenants:
            self._number += 1
            await self._store.add(self._writer, self._number, amounts, most_active(tenants))


def most_active(tenants: dict[str, TenantPoint]) -> dict[str, TenantPoint]:
    """Return the tenants with the most tokens by name, and the sums of all others under ""."""
    ranked = sorted(tenants, key=lambda tenant: -(tenants[tenant].tokens_in + tenants[tenant].tokens_out))
    points = {tenant: tenants[tenant] for tenant in ranked[:MAX_TENANTS]}
    for tenant in ranked[MAX_TENANTS:]:
        rest, point = points.setdefault("", TenantPoint()), tenants[tenant]
        rest.tokens_in += point.tokens_in
        rest.tokens_out += point.tokens_out
        rest.requests += point.requests
    return points


def _difference(now: EngineStats, before: EngineStats) -> dict[str, int]:
    amounts = {"tokens_in": now.num_prompt_tokens - before.num_prompt_tokens}
    for reason, count in now.num_finished.items():
        field = f"ended:{STATE_OF.get(FinishReason(reason), RequestState.FINISHED)}"
        amounts[field] = amounts.get(field, 0) + count - before.num_finished.get(reason, 0)
    for name in HISTOGRAMS:
        amounts |= bucket_amounts(name, getattr(now, name), getattr(before, name))
    return amounts
