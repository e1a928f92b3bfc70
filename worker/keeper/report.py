"""Publish a device and its models to Redis: homes, the record of the device, and cards of models never loaded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec
import structlog
from redis.exceptions import RedisError

from ...shared.broker import Homes
from ...shared.connection import CommandConnection
from ...shared.deployment.records import ModelCard, decode_record
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.messages.devices import DeviceRecord
from ...shared.partitions import open_homes
from ...shared.process.waiting import wait_at_most
from ...shared.swap.views import SleepLevel
from ..config.worker_config import WorkerConfig
from .keeper import DeviceKeeper
from .kept_model import KeptModel
from .plan import DevicePlan

INTERVAL_S = 1.0
# Partitions may change, and Redis may lose cards: both are looked at in one of so many rounds.
LOOK_EVERY = 10
LEAVE_PATIENCE_S = 1.0

log = structlog.get_logger()


class DeviceReporter:
    """Reporter of one device; ``publish`` until cancelled, then ``remove_device``.

    Args:
        homes: homes of each model, by name, which the keeper uses, too.
        cards: card of each model according to its files; replaced by those that engines write.

    Attributes:
        entered: done when clients know each model, or Redis has refused it once; it is tried again.
    """

    def __init__(
        self,
        connection: CommandConnection,
        config: WorkerConfig,
        plan: DevicePlan,
        keeper: DeviceKeeper,
        homes: dict[str, Homes],
        cards: Mapping[str, ModelCard],
    ) -> None:
        self._connection = connection
        self._keys = Keys(config.namespace)
        self._config = config
        self._plan = plan
        self._keeper = keeper
        self._homes = homes
        self._cards = dict(cards)
        self._changed: dict[str, asyncio.Event] = {name: asyncio.Event() for name in keeper.models}
        # What the home of each model says of it.
        self._home_states: dict[str, tuple[SleepLevel, bool]] = {}
        self._entering = set(keeper.models)
        self.entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        """Renew the homes of models whose state has changed."""
        for name, model in self._keeper.models.items():
            if self._home_states.get(name) != _state(model):
                self._changed[name].set()

    async def publish(self) -> None:
        """Report until cancelled. A shard that is away delays the home of its own models alone."""
        async with asyncio.TaskGroup() as tasks:
            for model in self._keeper.models.values():
                tasks.create_task(self._renew_home(model))
            tasks.create_task(self._write_record())

    async def remove_device(self) -> None:
        """Remove the device. In an unavailable Redis all of it expires."""
        with suppress(TimeoutError, PenstockError, RedisError):
            async with asyncio.timeout(LEAVE_PATIENCE_S):
                leaving = (home.leave(self._keeper.device_id) for home in self._homes.values())
                await asyncio.gather(*leaving, return_exceptions=True)
                await self._connection.execute("DEL", self._keys.device(self._keeper.device_id))
                await self._connection.execute("SREM", self._keys.devices(), self._keeper.device_id)

    async def _renew_home(self, model: KeptModel) -> None:
        num_rounds = 0
        while True:
            self._changed[model.name].clear()
            with _logging_failure(model):
                if num_rounds % LOOK_EVERY == 0:
                    self._homes[model.name] = await open_homes(self._connection, self._keys, model.name)
                    await self._register(model)
                await self._renew(model)
                num_rounds += 1
            self._entering.discard(model.name)
            if not self._entering and not self.entered.done():
                self.entered.set_result(None)
            await wait_at_most(INTERVAL_S, self._changed[model.name].wait())

    async def _renew(self, model: KeptModel) -> None:
        """Enter the home of a model with the forecast of when it is awake, or why it cannot be served here."""
        state = _state(model)
        await self._homes[model.name].renew(
            self._keeper.device_id,
            model.level,
            model.entry_s,
            ready_in_s=self._keeper.ready_in_s(model.name),
            num_seqs=model.planned.engine.max_num_seqs,
            error=model.broken_error,
            lease_ttl_ms=self._config.lease_ttl_ms,
        )
        self._home_states[model.name] = state

    async def _renew_changed(self) -> None:
        """Renew the homes of models whose state has changed. An unavailable shard delays this by ``INTERVAL_S``."""
        models = self._keeper.models
        changed = [models[name] for name, state in self._home_states.items() if state != _state(models[name])]

        async def renew(model: KeptModel) -> None:
            with _logging_failure(model):
                await self._renew(model)

        await wait_at_most(INTERVAL_S, asyncio.gather(*map(renew, changed)))

    async def _register(self, model: KeptModel) -> None:
        """Write the card of a model that no worker has loaded yet, or that Redis has lost."""
        data = await self._connection.execute("HGET", self._keys.models(), model.name)
        if data is None:
            if model.name in self._cards:
                card = msgspec.json.encode(self._cards[model.name])
                await self._connection.execute("HSETNX", self._keys.models(), model.name, card)
            return
        card = decode_record("model card", model.name, data, ModelCard)
        if card is not None:
            self._cards[model.name] = card

    async def _write_record(self) -> None:
        ttl_ms = int(self._config.heartbeat_ttl_s * 1000)
        device_id, num_rounds = self._keeper.device_id, 0
        while True:
            try:
                data = msgspec.json.encode(self.device_record())
                # An operator's command is done when the record says so. Requests that follow must then be accepted.
                await self._renew_changed()
                key = self._keys.device(device_id)
                former = await self._connection.execute("SET", key, data, "PX", ttl_ms, "GET")
                if former is None or num_rounds % LOOK_EVERY == 0:
                    await self._connection.execute("SADD", self._keys.devices(), device_id)
                num_rounds += 1
            except (PenstockError, RedisError) as error:
                log.debug("device_record_not_written", error=str(error))
            await asyncio.sleep(self._config.heartbeat_interval_s)

    def device_record(self) -> DeviceRecord:
        """Return the device's record as of now."""
        keeper, now_s = self._keeper, asyncio.get_running_loop().time()
        views = keeper.views()
        return DeviceRecord(
            device_id=keeper.device_id,
            worker_id=self._config.worker_id,
            host=socket.gethostname(),
            device=self._config.device_name,
            reported_at=time.time(),
            budget_bytes=self._plan.budget,
            host_budget_bytes=self._plan.host_budget,
            models=[keeper.models[view.name].device_model(view, now_s, keeper.options) for view in views],
            debt_s=round(keeper.debts.soft_s, 3),
            swap_share=round(keeper.log.share(now_s, keeper.serves_since_s), 4),
            last_swap=keeper.log.last,
            swap_counts=keeper.log.counts,
        )


@contextmanager
def _logging_failure(model: KeptModel) -> Iterator[None]:
    """Log that Redis did not take the home of a model. It is renewed again a second later."""
    try:
        yield
    except (PenstockError, RedisError) as error:
        log.debug("home_not_renewed", model=model.name, error=str(error))


def _state(model: KeptModel) -> tuple[SleepLevel, bool]:
    """Return the level of a model, and whether its requests are refused: changes that its home shows at once."""
    return model.level, bool(model.broken_reason)


def device_id_of(config: WorkerConfig) -> str:
    """Return the name of a device among the homes of its models."""
    return f"{config.worker_id}/{config.device_name}"


def models_awake(keepers: Sequence[DeviceKeeper]) -> list[str]:
    """Return the models that are awake on any device."""
    return sorted({view.name for keeper in keepers for view in keeper.views() if view.is_awake})
