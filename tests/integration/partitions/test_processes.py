"""What other processes do for a model does them for all its partitions: reapers, and who takes outboxes."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.producer import Client, SamplingParams
from penstock.producer.background.agenda import Agenda
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.outbox import Outbox
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.queue.lifecycle import RequestState
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor.reaper import Reaper
from penstock.worker.supervisor.restart import Death

from ..client.harness import until
from .conftest import MODEL, Parts, tenant_of

CONFIG = WorkerConfig(worker_id="w", engine_id="e0", redis_url="", engine=EngineConfig(model=MODEL), lease_ttl_s=0.3)


async def claim_in_each(client: Client, parts: Parts, engine_id: str) -> None:
    for number in range(2):
        await client.submit("hi", SamplingParams(), tenant=tenant_of(number, 2), request_id=f"r{number}")
        assert len((await parts[number].claim(engine_id, EngineCapacity(max_num_seqs=1), lease_ttl_ms=300)).claims) == 1


async def are_queued(parts: Parts) -> bool:
    return [await parts[number].state(f"r{number}") for number in range(2)] == [RequestState.QUEUED] * 2


async def test_a_reaper_reclaims_requests_of_a_dead_engine_in_all_partitions(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    await claim_in_each(client, parts, "gone")
    running = asyncio.create_task(Reaper(parts.commands, _config(parts)).run())
    await until(lambda: are_queued(parts))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_supervisor_reclaims_requests_of_its_engine_in_all_partitions(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    await claim_in_each(client, parts, "e0")
    await Reaper(parts.commands, _config(parts)).reclaim("e0", Death(reason="killed", is_external=True))
    assert await are_queued(parts)


async def test_the_outbox_of_each_partition_is_taken(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    await parts.commands.execute("SADD", parts.keys.webhook_models(), MODEL)
    of_second = Broker(parts.commands, parts.keys.model(MODEL, 1)).keys.outbox
    await parts.commands.execute("XADD", of_second, "*", "no", "event")
    agenda = Agenda(parts.commands, parts.keys)
    outbox = Outbox(parts.commands, parts.keys, EventStore(parts.commands, parts.keys, agenda))
    await outbox.collect()
    await outbox.close()
    assert await parts.commands.execute("XLEN", of_second) == 0


def _config(parts: Parts) -> WorkerConfig:
    return msgspec.structs.replace(CONFIG, namespace=parts.keys.namespace)
