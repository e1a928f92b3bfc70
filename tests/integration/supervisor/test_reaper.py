"""What other hosts' dead engines held is taken back, by one of all reapers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor.reaper import Reaper

from .stub_host import MODEL, eventually

LEASE_TTL_MS = 300


@pytest.fixture
async def reapers(commands: CommandConnection, redis_url: str, namespace: str) -> AsyncIterator[list[Reaper]]:
    """Two, as on two hosts, at work."""
    await commands.execute("HSET", Keys(namespace).models(), MODEL, b"{}")
    config = WorkerConfig(
        worker_id="a",
        engine_id="a-0",
        redis_url=redis_url,
        namespace=namespace,
        engine=EngineConfig(model="another"),
        lease_ttl_s=LEASE_TTL_MS / 1000,
    )
    connections = [CommandConnection(redis_url) for _ in range(2)]
    reapers = [Reaper(connection, config) for connection in connections]
    running = [asyncio.create_task(reaper.run()) for reaper in reapers]
    yield reapers
    for task in running:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for connection in connections:
        await connection.close()


@pytest.fixture
def broker(commands: CommandConnection, namespace: str) -> Broker:
    return Broker(commands, Keys(namespace).model(MODEL))


async def test_one_of_two_reapers_reclaims_the_requests_of_a_dead_host(reapers: list[Reaper], broker: Broker) -> None:
    with capture_logs() as logs:
        for request_id in ("r1", "r2"):
            await broker.enqueue(request_id, b"payload", result_ttl_ms=60_000)
        assert len((await broker.claim("b-0", EngineCapacity(max_num_seqs=2), lease_ttl_ms=LEASE_TTL_MS)).claims) == 2

        async def are_queued() -> bool:
            return {await broker.state("r1"), await broker.state("r2")} == {"queued"}

        await eventually(are_queued)
        # Once more for each of the two, had they anything to find.
        await asyncio.gather(*(reaper._reap(MODEL) for reaper in reapers))
    (found,) = [entry for entry in logs if entry["event"] == "engine_lease_ended"]
    assert (found["engine_id"], found["model"], found["num_returned"], found["num_parked"]) == ("b-0", MODEL, 2, 0)
    assert {
        claim.request_id: claim.attempt for claim in (await broker.claim("c-0", EngineCapacity(max_num_seqs=8))).claims
    } == {
        "r1": 2,
        "r2": 2,
    }


async def test_an_engine_that_renews_is_left_alone(reapers: list[Reaper], broker: Broker) -> None:
    for times in (1, 10, 100):  # as long as this machine lets the test come to a renewal within it
        if await _is_left_alone(broker, times * LEASE_TTL_MS):
            return
    pytest.fail("renewals do not come in time")


async def _is_left_alone(broker: Broker, lease_ttl_ms: int) -> bool:
    """Renew until a lease of twice the length has ended; False if a renewal came too late to tell."""
    await broker.enqueue("r", b"payload", result_ttl_ms=600_000)
    renewed_at = time.monotonic()
    (held,) = (await broker.claim("b-0", EngineCapacity(max_num_seqs=1), lease_ttl_ms=lease_ttl_ms)).claims
    assert held.request_id == "r"
    # Another engine's end shows that the reapers have looked, and counted leases, after this one's first would have.
    await broker.enqueue("other", b"payload", result_ttl_ms=600_000)
    assert (await broker.claim("dead-0", EngineCapacity(max_num_seqs=1), lease_ttl_ms=2 * lease_ttl_ms)).claims
    longest_s = 0.0

    async def other_is_queued() -> bool:
        nonlocal renewed_at, longest_s
        before, renewed_at = renewed_at, time.monotonic()
        stale = await broker.renew("b-0", [(held.request_id, held.epoch)], lease_ttl_ms=lease_ttl_ms)
        longest_s = max(longest_s, time.monotonic() - before)
        assert not stale or longest_s > lease_ttl_ms / 1000
        return bool(stale) or await broker.state("other") == "queued"

    await eventually(other_is_queued)
    is_left = await broker.state("r") == "claimed"
    assert is_left or longest_s > lease_ttl_ms / 1000
    for request_id in ("r", "other"):
        await broker.cancel(request_id)
        await broker.forget(request_id)
    return is_left


async def test_a_vanished_clients_requests_are_cancelled(reapers: list[Reaper], broker: Broker) -> None:
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000, client_id="c", client_ttl_ms=LEASE_TTL_MS)

    async def is_cancelled() -> bool:
        return await broker.state("r") == "cancelled"

    await eventually(is_cancelled)


async def test_a_model_in_disorder_keeps_no_reaper_from_the_others(
    reapers: list[Reaper], broker: Broker, commands: CommandConnection, namespace: str
) -> None:
    keys = Keys(namespace)
    with capture_logs() as logs:
        await commands.execute("SET", keys.model("a-broken-one").prefix + "reaper", b"not a hash")
        await commands.execute("HSET", keys.models(), "a-broken-one", b"{}", "an{unusable}name", b"{}")
        await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
        assert (await broker.claim("b-0", EngineCapacity(max_num_seqs=1), lease_ttl_ms=LEASE_TTL_MS)).claims

        async def is_queued() -> bool:
            return await broker.state("r") == "queued"

        def said() -> list[str]:
            return [entry["error"] for entry in logs if entry["event"] == "reaping_failed"]

        async def is_put_right() -> bool:
            """Check that what another program has put in a key's place is put right."""
            return await commands.execute("TYPE", keys.model("a-broken-one").prefix + "reaper") != b"string"

        # Whoever had asked which models there are before these were listed has not seen them yet.
        for found in (is_queued, is_put_right, lambda: any("an{unusable}name" in error for error in said())):
            await eventually(found)
    # The two reapers look at different times, and each says once what it found.
    assert len(said()) <= 4
