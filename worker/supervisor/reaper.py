"""Takes back what dead engines held: this host's own by name, and everybody else's when their lease has ended.

Any supervisor may reap any engine, so requests move on when a whole host is gone. The broker sees to it that each
claim is taken back once, whoever comes first.
"""

from __future__ import annotations

import asyncio
import itertools

import structlog
from redis.exceptions import RedisError

from ...shared.broker import REAP_INTERVAL_S, Broker, Reaped
from ...shared.connection import CommandConnection
from ...shared.deployment.heartbeats import drop_overdue
from ...shared.deployment.records import DeathCause
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.names import partition_name
from ...shared.partitions import Layout, read_layouts
from ...shared.side_by_side import SideBySide
from ..config.worker_config import WorkerConfig
from .restart import Death

# A model that is new has engines whose parents reap them, so the list may be a little old.
LOOKS_PER_LIST = 10
# For a Redis that answers, but with errors: then requests stay where they are, and the engine is started all the same.
MAX_RECLAIM_TRIES = 30
RECLAIM_PAUSE_S = 1.0
PARTITION_PATIENCE_S = 3.0

log = structlog.get_logger()


class Reaper:
    """Gives the requests of dead engines back to the queue.

    Args:
        connection: one that waits for Redis as long as it takes.
        config: of any engine of this supervisor.
    """

    def __init__(self, connection: CommandConnection, config: WorkerConfig) -> None:
        self._connection = connection
        self._keys = Keys(config.namespace)
        self._model = config.engine.model_name
        self._max_deliveries = config.max_deliveries
        self._lease_ttl_ms = config.lease_ttl_ms
        self._trouble = ""
        self._listed_at_s = 0

    async def run(self) -> None:
        """Look at all models until cancelled; no error ends it, and none keeps it from the other models.

        To a reaper each partition of a model is one.
        """
        partitions: list[str] = []
        looks = SideBySide(self._look)
        try:
            for num_looks in itertools.count():
                try:
                    if num_looks % LOOKS_PER_LIST == 0 or not partitions:
                        partitions = await self._list()
                    self._note(await looks.round(partitions, REAP_INTERVAL_S))
                except Exception as error:
                    self._note([error])
                await asyncio.sleep(REAP_INTERVAL_S)
        finally:
            await looks.close()

    async def reclaim(self, engine_id: str, death: Death, *, hands_back: bool = False) -> None:
        """Take back what an engine of this host held, which is known to be dead. Returns when that is done.

        It has to be done before the engine is started again: its next life has the same name. Nothing is lost by
        waiting for a Redis that is away, since an engine cannot start without it either; but it can without that of one
        partition of several, where it hands back what its former life held as soon as it is there again.

        Args:
            hands_back: it was to hand back what it held, and was killed before it had time for that: its end is no
                death of any request, however little each had made.
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
                    log.error("requests_not_taken_back", engine_id=engine_id, error=str(error))
                    return
                await asyncio.sleep(RECLAIM_PAUSE_S)
            else:
                if num_returned or num_parked:
                    log.info(
                        "requests_taken_back", engine_id=engine_id, num_returned=num_returned, num_parked=num_parked
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
        """Notice a clock of Redis that was set back, which keeps what is to expire."""
        now_s = int((await self._connection.execute("TIME"))[0])
        if now_s < self._listed_at_s:
            log.warning("redis_clock_set_back", by_s=self._listed_at_s - now_s)
            await drop_overdue(self._connection.execute, self._keys)
        self._listed_at_s = now_s

    async def _look(self, model: str) -> None:
        cause = DeathCause(engine_id="", reason="its lease ended: its host, its process or its way to Redis is gone")
        found = await Broker(self._connection, self._keys.model(model)).reap(
            cause, max_deliveries=self._max_deliveries, lease_ttl_ms=self._lease_ttl_ms
        )
        for reaped in found:
            _tell(model, reaped)

    def _note(self, errors: list[BaseException]) -> None:
        """Say what goes wrong once, not twice a second."""
        trouble = "; ".join(str(error) or type(error).__name__ for error in errors)
        if trouble and trouble != self._trouble:
            log.error("reaping_failed", error=trouble)
        self._trouble = trouble


def _tell(model: str, reaped: Reaped) -> None:
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
