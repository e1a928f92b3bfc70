"""Metrics of a deployment, read every few seconds, so that scrapes are immediate and cost Redis nothing."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from redis.exceptions import NoPermissionError, RedisError

from ...producer.control.deployment import SCRAPE_PATIENCE_S, ModelState, read_device_samples, read_models
from ...producer.webhooks.events import EventState
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.metrics import Sample, values_of
from ...shared.partitions import open_dead_letter
from ...shared.process.log import get_logger
from ...shared.redis_access.check import info_fields
from ...shared.shards import HOME, check_servers, make_commands, make_servers
from ...shared.values.distribution import VERSION
from .usage import usage_samples
from .wanted import ServiceRate, WantedOptions, wanted_engines

log = get_logger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """Signal of one model for autoscalers: wanted engines, and engines that serve it."""

    wanted_engines: float
    num_engines: int


class Snapshot:
    """The last metrics of a deployment, refreshed while ``run`` runs.

    Args:
        url, shards: the deployment, as of ``Client``.
        options: options for the wanted number of engines.
        details: reported options of this process, as of ``ProcessRecord``.
    """

    def __init__(
        self,
        url: str,
        shards: Mapping[str, str],
        keys: Keys,
        options: WantedOptions,
        *,
        refresh_s: float,
        details: dict[str, str] | None = None,
    ) -> None:
        self._url = url
        self._shards = shards
        self._keys = keys
        self._options = options
        self._refresh_s = refresh_s
        self._details = details
        self._rates: dict[str, ServiceRate] = defaultdict(ServiceRate)
        self._samples: list[Sample] = []
        self._read_at = time.monotonic()
        self.is_good = False
        self.wanted: dict[str, Wanted] = {}

    def samples(self) -> list[Sample]:
        """Return the last samples and their age."""
        own = {"snapshot_ok": float(self.is_good), "snapshot_age_seconds": time.monotonic() - self._read_at}
        build = values_of((VERSION,), {"build_info": 1.0})
        return [*build, *values_of((), own), *self._samples]

    async def run(self) -> None:
        """Read until cancelled."""
        servers = make_servers(self._url, self._shards)
        commands = make_commands(self._url, self._shards, self._keys)
        presence = Presence(commands, self._keys, ProcessKind.EXPORTER, self._details)
        presence.start()
        is_fit = False
        try:
            while True:
                is_fit = is_fit or await self._is_fit()
                await self._read_everything(commands if is_fit else None, servers)
                await asyncio.sleep(self._refresh_s)
        finally:
            await presence.leave()
            for connection in (commands, *servers.values()):
                await connection.close()

    async def _is_fit(self) -> bool:
        """Return whether Redis can be used; log the reason if not."""
        try:
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                await check_servers(self._url, self._shards, namespace=self._keys.namespace)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("not_connected", reason=str(error) or "Redis does not answer in time")
            return False
        return True

    async def _read_everything(
        self, commands: CommandConnection | None, servers: Mapping[str, CommandConnection]
    ) -> None:
        """Read everything again; without ``commands`` only the metrics of the servers."""
        models, redis, home = await asyncio.gather(
            self._model_samples(commands), redis_samples(servers), self._home_samples(servers[HOME])
        )
        states, samples = models
        samples += [*redis, *home]
        if states is not None:
            self._update_wanted(states)
        for model, signal in self.wanted.items():
            samples += values_of((model,), {"wanted_engines": signal.wanted_engines})
        self.is_good = states is not None and all(state.queue is not None for state in states)
        self._samples, self._read_at = samples, time.monotonic()

    def _update_wanted(self, states: list[ModelState]) -> None:
        """Update the wanted engines. Keep the value of an unreadable queue, so that no autoscaler removes engines."""
        signals: dict[str, Wanted] = {}
        for state in states:
            if state.queue is not None:
                number = wanted_engines(state.queue, state.engines, self._rates[state.model], self._options)
                signals[state.model] = Wanted(number, state.num_serving)
            elif state.model in self.wanted:
                signals[state.model] = self.wanted[state.model]
        self.wanted = signals

    async def _model_samples(self, commands: CommandConnection | None) -> tuple[list[ModelState] | None, list[Sample]]:
        states = None if commands is None else await read_models(commands, self._keys)
        if commands is None or states is None:
            return None, []
        parked = await asyncio.gather(*(self._parked(commands, state.model) for state in states))
        of_states = [sample for state in states for sample in state.samples()]
        of_devices = await read_device_samples(commands, self._keys)
        usage = await self._usage(commands, [state.model for state in states])
        return states, [*of_states, *of_devices, *usage, *(sample for samples in parked for sample in samples)]

    async def _usage(self, commands: CommandConnection, models: Sequence[str]) -> list[Sample]:
        try:
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                return await usage_samples(commands, self._keys, models)
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("snapshot_incomplete", reason=str(error) or "Redis does not answer in time")
            return []

    async def _parked(self, commands: CommandConnection, model: str) -> list[Sample]:
        try:
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                letter = await open_dead_letter(commands, self._keys, model)
                return [*values_of((model,), {"dead_letter_requests": await letter.count()})]
        except (TimeoutError, PenstockError, RedisError):
            return []

    async def _home_samples(self, home: CommandConnection) -> list[Sample]:
        """Return samples of webhooks and batches, which are on the home server."""
        samples: list[Sample] = []
        try:
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                for state in (EventState.PENDING, EventState.DEAD):
                    number = await home.execute("ZCARD", self._keys.webhook_events(state))
                    samples += values_of((state.value,), {"webhook_deliveries": number})
                samples += values_of((), {"open_batches": await home.execute("ZCARD", self._keys.batches().open)})
        except (TimeoutError, PenstockError, RedisError) as error:
            log.warning("snapshot_incomplete", reason=str(error) or "Redis does not answer in time")
        return samples


async def redis_samples(servers: Mapping[str, CommandConnection]) -> list[Sample]:
    """Read all servers concurrently. A server that does not answer in time counts as down."""
    by_server = await asyncio.gather(*(_server_samples(name, server) for name, server in servers.items()))
    return [sample for samples in by_server for sample in samples]


async def _server_samples(name: str, server: CommandConnection) -> list[Sample]:
    try:
        async with asyncio.timeout(SCRAPE_PATIENCE_S):
            info = info_fields(await server.execute("INFO"))
    except NoPermissionError:
        return [*values_of((name,), {"redis_up": 1.0})]  # it answers, but forbids INFO
    except (TimeoutError, PenstockError, RedisError):
        return [*values_of((name,), {"redis_up": 0.0})]
    values = {
        "redis_up": 1.0,
        "redis_used_memory_bytes": float(info["used_memory"]),
        "redis_max_memory_bytes": float(info["maxmemory"]),
        "redis_append_only": float(info["aof_enabled"]),
    }
    return [*values_of((name,), values)]
