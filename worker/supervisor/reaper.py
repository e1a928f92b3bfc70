"""Reclaims the requests of dead engines: of this host's engines by name, and of all others when their lease expires.

Any supervisor may reap any engine, so requests move on when a whole host fails. The broker makes sure that each claim
is reclaimed once, whichever supervisor comes first.
"""

from __future__ import annotations

import asyncio
import itertools

import structlog
from redis.exceptions import RedisError

from ...shared.broker import REAP_INTERVAL_S, Broker, ReapResult
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import drop_overdue
from ...shared.deployment.records import DeathCause
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.partitions import Layout, read_layouts
from ...shared.partitions.budgets import sync_if_due
from ...shared.process.side_by_side import SideBySide
from ...shared.values.names import partition_name
from ..config.worker_config import WorkerConfig
from .restart import Death

# The list may be a little old, because the engines of a new model are reaped by their own supervisors.
ROUNDS_PER_LIST = 10
# Limit for a Redis that answers with errors. The requests then stay where they are, and the engine is restarted.
MAX_RECLAIM_TRIES = 30
RECLAIM_PAUSE_S = 1.0
PARTITION_PATIENCE_S = 3.0

# Name of the synchronization of budgets among the models to reap.
BUDGETS = ""

log = structlog.get_logger()


class Reaper:
    """Returns the requests of dead engines to the queue.

    Args:
        connection: a connection that retries without limit while Redis is away.
        config: configuration of any engine of this supervisor.
    """

    def __init__(self, connection: CommandConnection, config: WorkerConfig) -> None:
        self._connection = connection
        self._keys = Keys(config.namespace)
        self._model = config.engine.model_name
        self._max_deliveries = config.max_deliveries
        self._lease_ttl_ms = config.lease_ttl_ms
        self._last_failure = ""
        self._listed_at_s = 0

    async def run(self) -> None:
        """Reap all models until cancelled. No error ends the loop or keeps it from other models.

        A reaper treats each partition of a model as a model of its own.
        """
        partitions: list[str] = []
        reaping = SideBySide(self._reap_or_sync)
        try:
            for num_rounds in itertools.count():
                try:
                    if num_rounds % ROUNDS_PER_LIST == 0 or not partitions:
                        partitions = await self._list()
                    self._log_new_errors(await reaping.round([*partitions, BUDGETS], REAP_INTERVAL_S))
                except Exception as error:
                    self._log_new_errors([error])
                await asyncio.sleep(REAP_INTERVAL_S)
        finally:
            await reaping.close()

    async def reclaim(self, engine_id: str, death: Death, *, hands_back: bool = False) -> None:
        """Reclaim the requests of a dead engine of this host.

        Call it before the engine is restarted, because the next process has the same name. Waiting for a Redis that is
        away loses nothing, since an engine cannot start without it either. It can start without the Redis of one
        partition of several, so such a partition is waited for only briefly: the engine itself releases the requests of
        its former process there once the partition is back.

        Args:
            hands_back: whether the engine was asked to release its requests and was killed before it could. Its end
                does not count as a death of any request then.
        """
        cause = DeathCause(engine_id=engine_id, reason=death.reason, trace=death.trace)
        layout = (await read_layouts(self._connection, self._keys)).get(self._model, Layout())
        reclaims = [
            asyncio.create_task(self._reclaim(number, engine_id, cause, death, hands_back))
            for number in range(layout.num_known)
        ]
        try:
            await asyncio.wait(reclaims, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(reclaims, timeout=PARTITION_PATIENCE_S)
        finally:
            for task in reclaims:
                task.cancel()
            outcomes = await asyncio.gather(*reclaims, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _reclaim(self, partition: int, engine_id: str, cause: DeathCause, death: Death, hands_back: bool) -> None:
        broker = Broker(self._connection, self._keys.model(self._model, partition), partition)
        for num_tries in itertools.count(1):
            try:
                if hands_back and (claims := await broker.claims(engine_id)):
                    await broker.release(claims)
                num_returned, num_parked = await broker.reclaim(
                    engine_id, cause, is_external=death.is_external, max_deliveries=self._max_deliveries
                )
            except (PenstockError, RedisError) as error:
                if num_tries == MAX_RECLAIM_TRIES:
                    log.error("requests_not_reclaimed", engine_id=engine_id, error=str(error))
                    return
                await asyncio.sleep(RECLAIM_PAUSE_S)
            else:
                if num_returned or num_parked:
                    log.info(
                        "requests_reclaimed", engine_id=engine_id, num_returned=num_returned, num_parked=num_parked
                    )
                return

    async def _list(self) -> list[str]:
        await self._watch_clock()
        models = [name.decode() for name in await self._connection.execute("HKEYS", self._keys.models())]
        layouts = await read_layouts(self._connection, self._keys)
        return [
            partition_name(model, number)
            for model in models
            for number in range(layouts.get(model, Layout()).num_known)
        ]

    async def _watch_clock(self) -> None:
        """Drop overdue heartbeats when the clock of Redis was set back, because they would not expire in time."""
        now_s = int((await self._connection.execute("TIME"))[0])
        if now_s < self._listed_at_s:
            log.warning("redis_clock_set_back", by_s=self._listed_at_s - now_s)
            await drop_overdue(self._connection.execute, self._keys)
        self._listed_at_s = now_s

    async def _reap_or_sync(self, name: str) -> None:
        if name == BUDGETS:
            await sync_if_due(self._connection, self._keys)
        else:
            await self._reap(name)

    async def _reap(self, model: str) -> None:
        cause = DeathCause(engine_id="", reason="its lease ended: its host, its process or its way to Redis is gone")
        dead = await Broker(self._connection, self._keys.model(model)).reap(
            cause, max_deliveries=self._max_deliveries, lease_ttl_ms=self._lease_ttl_ms
        )
        for reaped in dead:
            _log_reaped(model, reaped)

    def _log_new_errors(self, errors: list[BaseException]) -> None:
        """Log a failure when it changes, not in every round."""
        failure = "; ".join(str(error) or type(error).__name__ for error in errors)
        if failure and failure != self._last_failure:
            log.error("reaping_failed", error=failure)
        self._last_failure = failure


def _log_reaped(model: str, reaped: ReapResult) -> None:
    if reaped.kind == "engine":
        log.warning(
            "engine_lease_ended",
            model=model,
            engine_id=reaped.name,
            num_returned=reaped.num_requests,
            num_parked=reaped.num_parked,
        )
    else:
        log.info("client_vanished", model=model, client_id=reaped.name, num_cancelled=reaped.num_requests)
