"""Read the state of a deployment, its problems and its metrics, for the command, the gateway and the dashboard."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection

import msgspec
from redis.exceptions import RedisError

from ...shared.connection import CommandConnection
from ...shared.deployment.presence import (
    ProcessKind,
    ProcessRecord,
    read_devices,
    read_heartbeats,
    read_processes,
)
from ...shared.deployment.records import UNREADABLE, EngineHeartbeat
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.messages.devices import DeviceRecord, ModelPhase
from ...shared.messages.supervision import EngineState
from ...shared.metrics import SERVING, Sample, devices_samples, engines_samples, queue_samples
from ...shared.partitions import open_queue
from ...shared.queue.stats import QueueStats
from ...shared.redis_access.check import Risk, info_fields, risks_of
from ..requests.health import may_serve
from ..requests.model_cards import ModelCards, known_models
from ..webhooks.event_store import DELIVER
from ..webhooks.outbox import outboxes_of

PATIENCE_S = 5.0
# An item that is due for this long is overdue: no process works on it, since a jobs process polls every second.
DUE_AFTER_S = 5.0
MAX_DUE_COUNTED = 1000
# Names of the kinds of agenda items for people. The second is spelled out, since ``jobs/batches.py`` needs arq.
_DUE_NAMES = {DELIVER: "webhooks", "run_batch": "batches"}


# Prometheus waits 10 s for all of a scrape.
SCRAPE_PATIENCE_S = 2.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that an operator should look at. ``is_error``: requests or jobs do not progress because of it."""

    code: str
    message: str
    remedy: str
    is_error: bool = True


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """State of a deployment.

    Args:
        queues: of all models that were ever served, and of the ``awaited`` ones. Requests wait for an awaited model
            although no worker has served it yet.
        num_due: number of due items by kind.
        devices: devices that several models share.
    """

    processes: list[ProcessRecord]
    engines: list[EngineHeartbeat]
    queues: list[QueueStats]
    num_due: dict[str, int]
    findings: list[Finding]
    awaited: list[str] = []
    devices: list[DeviceRecord] = []


async def read_deployment(connection: CommandConnection, keys: Keys) -> Deployment:
    """Read the state of the whole deployment. A model whose Redis does not answer within 5 s is a finding.

    Raises:
        RedisUnavailableError: the home Redis is not reachable.
    """
    served, awaited = await ModelCards(connection, keys, default=None, wait_for_model=True).read_with_awaited()
    cards = sorted([*served, *awaited])
    unreadable: list[str] = []
    processes, engines, devices, num_due, queues = await asyncio.gather(
        read_processes(connection.execute, keys),
        read_heartbeats(connection.execute, keys, unreadable=unreadable),
        read_devices(connection.execute, keys),
        count_due(connection, keys),
        asyncio.gather(*(stats_soon(connection, keys, name) for name in cards)),
    )
    reachable = [stats for stats in queues if stats is not None]
    findings = [
        Finding(
            code="model_away",
            message=f"the Redis that holds model {name} does not answer",
            remedy="see penstock shard list",
        )
        for name, stats in zip(cards, queues, strict=True)
        if stats is None
    ]
    findings += jobs_findings(processes, num_due)
    findings += [finding for stats in reachable for finding in _queue_findings(stats, engines, served)]
    findings += [_engine_finding(engine) for engine in engines if engine.state is EngineState.FAILED]
    findings += [finding for device in devices for finding in _device_findings(device)]
    findings += [
        Finding(
            code="engine_unreadable",
            message=f"the heartbeat of engine {engine_id} is {UNREADABLE}",
            remedy="use the commands of the version that the engine has",
            is_error=False,
        )
        for engine_id in unreadable
    ]
    # After the queues, because reading them has found the servers of the models.
    findings += [
        Finding(code=risk.code, message=risk.message, remedy=risk.remedy, is_error=False)
        for risk in await redis_risks(connection, keys, cards)
    ]
    return Deployment(
        processes=processes,
        engines=engines,
        queues=reachable,
        num_due=num_due,
        findings=findings,
        awaited=awaited,
        devices=devices,
    )


async def redis_risks(connection: CommandConnection, keys: Keys, models: list[str]) -> list[Risk]:
    """Return the risks for requests at the home Redis and at those that hold models, without unreachable ones."""
    links = {id(link): link for link in (connection, *(connection.link_to(keys.model(name).queue) for name in models))}
    risks_by_link = await asyncio.gather(*(_risks_at(link) for link in links.values()))
    return [risk for risks in risks_by_link for risk in risks]


async def _risks_at(link: CommandConnection) -> list[Risk]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return risks_of(info_fields(await link.execute("INFO")), link.shown_url)
    except (TimeoutError, PenstockError, RedisError):
        return []


async def count_due(connection: CommandConnection, keys: Keys) -> dict[str, int]:
    """Return the number of overdue items by kind ("webhooks", "batches", ...): items that no process works on."""
    seconds, _ = await connection.execute("TIME")
    last_ms = 1000 * (int(seconds) - int(DUE_AFTER_S))
    due = await connection.execute("ZRANGEBYSCORE", keys.jobs_due(), "-inf", last_ms, "LIMIT", 0, MAX_DUE_COUNTED)
    kinds: list[str] = [item.decode().partition(":")[0] for item in due]
    counts = Counter(_DUE_NAMES.get(kind, kind) for kind in kinds)
    outboxes = await outboxes_of(connection, keys)
    ended = await asyncio.gather(*(_ended_before(connection, outbox, last_ms) for outbox in outboxes))
    if sum(ended):
        counts["webhooks"] += sum(ended)
    return dict(counts)


def jobs_findings(processes: list[ProcessRecord], num_due: dict[str, int]) -> list[Finding]:
    """Return a finding if items are due and no jobs process runs."""
    if any(process.kind == ProcessKind.JOBS for process in processes) or not num_due:
        return []
    items = " and ".join(f"{count} {name}" for name, count in sorted(num_due.items()))
    return [
        Finding(code="no_jobs", message=f"no jobs process runs, and {items} are due", remedy="start 'penstock jobs'")
    ]


async def _ended_before(connection: CommandConnection, outbox: str, last_ms: int) -> int:
    """Return how many entries of an outbox no process has read in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return len(await connection.execute("XRANGE", outbox, "-", last_ms, "COUNT", MAX_DUE_COUNTED))
    except (TimeoutError, PenstockError):
        return 0


async def stats_soon(
    connection: CommandConnection, keys: Keys, model: str, patience_s: float = PATIENCE_S
) -> QueueStats | None:
    """Return the statistics of a model's queue; None if its Redis does not answer in time."""
    try:
        async with asyncio.timeout(patience_s):
            return await (await open_queue(connection, keys, model)).stats()
    except (TimeoutError, PenstockError):
        return None


def unserved_finding(stats: QueueStats, engines: list[EngineHeartbeat], known: Collection[str]) -> Finding | None:
    """Return a finding about requests for a model that no engine serves and no device may wake; None if none waits.

    Args:
        known: models that were ever served.
    """
    may_wake = stats.readiness.in_s is not None
    if not stats.depth or may_wake or any(engine.model == stats.model and may_serve(engine) for engine in engines):
        return None
    count = "1 request waits" if stats.depth == 1 else f"{stats.depth} requests wait"
    age = f", the oldest for {stats.oldest_age_s:.0f} s" if stats.oldest_age_s else ""
    if stats.model in known:
        return Finding(
            code="no_engine",
            message=f"no engine serves model {stats.model}, and {count} for it{age}",
            remedy="start 'penstock worker start'",
        )
    return Finding(
        code="unknown_model",
        message=f"no worker has ever served model {stats.model}, and {count} for it{age}; "
        + known_models(stats.model, known),
        remedy="start a worker that serves it, or cancel them if the name is wrong",
    )


def _queue_findings(stats: QueueStats, engines: list[EngineHeartbeat], known: Collection[str]) -> list[Finding]:
    findings: list[Finding] = []
    if (unserved := unserved_finding(stats, engines, known)) is not None:
        findings.append(unserved)
    if stats.is_paused:
        findings.append(
            Finding(
                code="paused",
                message=f"the queue of model {stats.model} is paused, and {stats.depth} requests wait",
                remedy=f"penstock queue resume {stats.model}",
                is_error=False,
            )
        )
    return findings


def _engine_finding(engine: EngineHeartbeat) -> Finding:
    comes_back = f"it starts again in {max(0.0, engine.restart_at - time.time()):.0f} s" if engine.restart_at else ""
    return Finding(
        code="engine_failed",
        message=f"engine {engine.engine_id} has failed: {engine.error.splitlines()[0] if engine.error else 'unknown'}",
        remedy=comes_back or f"look at the log of worker {engine.worker_id}",
        is_error=not engine.restart_at,
    )


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


def _device_findings(device: DeviceRecord) -> list[Finding]:
    return [
        Finding(
            code="model_broken",
            message=f"model {model.name} cannot be loaded on {device.device_id}: {model.error or 'unknown'}",
            remedy=f"mend it, then penstock worker models --load {model.name}",
        )
        for model in device.models
        if model.phase == ModelPhase.BROKEN
    ]


async def read_models(connection: CommandConnection, keys: Keys) -> list[ModelState] | None:
    """Return the state of each model; None if the home Redis, which lists the models, does not answer.

    Takes bounded time however slow Redis is.
    """
    try:
        async with asyncio.timeout(SCRAPE_PATIENCE_S):
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


async def read_device_samples(connection: CommandConnection, keys: Keys) -> list[Sample]:
    """Return the metrics of devices that several models share; none if Redis does not answer."""
    try:
        async with asyncio.timeout(SCRAPE_PATIENCE_S):
            return [*devices_samples(await read_devices(connection.execute, keys))]
    except (TimeoutError, PenstockError, RedisError):
        return []


async def _stats(connection: CommandConnection, keys: Keys, model: str) -> QueueStats | None:
    try:
        return await stats_soon(connection, keys, model, SCRAPE_PATIENCE_S)
    except RedisError:
        return None
