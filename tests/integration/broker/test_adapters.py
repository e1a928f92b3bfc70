"""Requests with an adapter go to an engine that has it loaded, for a bounded moment, and then to anybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.broker.engine_calls import report_loaded
from penstock.shared.connection import CommandConnection

from ...processes import DEADLINE_S
from .claims.test_wakes import Woken, look, woken
from .conftest import die, enqueue, take
from .snapshot import read_snapshot

__all__ = ["woken"]

CATS, DOGS = "c" * 64, "d" * 64


async def load(broker: Broker, commands: CommandConnection, engine: str, *digests: str, ttl_ms: int = 30_000) -> None:
    await report_loaded(commands, broker.keys, engine, digests, ttl_ms=ttl_ms)


async def ids(broker: Broker, engine: str, limit: int = 10, **options: Any) -> list[str]:
    return [claim.request_id for claim in await take(broker, engine, limit, **options)]


@pytest.mark.usefixtures("patient_engines")
async def test_a_request_is_left_to_an_engine_that_has_its_adapter(broker: Broker, commands: CommandConnection) -> None:
    for engine in ("e0", "e1"):
        await look(broker, engine)
    await load(broker, commands, "e1", CATS)
    await enqueue(broker, "cat", adapter=CATS)
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=10))
    assert wave.claims == []
    assert 0 < wave.retry_ms <= 60_000
    assert await ids(broker, "e1") == ["cat"]


@pytest.mark.usefixtures("patient_engines")
async def test_requests_for_engines_with_the_adapter_do_not_block_others(
    broker: Broker, commands: CommandConnection
) -> None:
    for engine in ("e0", "e1"):
        await look(broker, engine)
    await load(broker, commands, "e1", CATS)
    await enqueue(broker, "cat", adapter=CATS, tenant="a")
    await enqueue(broker, "plain", tenant="b")
    taken = await ids(broker, "e0", 1)
    assert "cat" not in taken
    assert sorted(taken + await ids(broker, "e1")) == ["cat", "plain"]


async def test_any_engine_claims_the_request_after_the_delay(broker: Broker, commands: CommandConnection) -> None:
    """No wake reaches this engine: it retries after the delay that its claim returned."""
    for engine in ("e0", "e1"):
        await look(broker, engine)
    await load(broker, commands, "e1", CATS)
    await enqueue(broker, "cat", adapter=CATS)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            wave = await broker.claim("e0", EngineCapacity(max_num_seqs=10))
            if wave.claims:
                break
            assert wave.retry_ms >= 0
            await asyncio.sleep(wave.wait_s)
    assert [claim.request_id for claim in wave.claims] == ["cat"]


@pytest.mark.usefixtures("patient_engines")
async def test_nothing_is_left_to_an_engine_that_is_full_dead_or_has_let_go_of_it(
    broker: Broker, commands: CommandConnection
) -> None:
    await look(broker, "e0")
    await look(broker, "e1", held=10)
    await load(broker, commands, "e1", CATS)
    await enqueue(broker, "full", adapter=CATS)
    assert await ids(broker, "e0") == ["full"]
    await look(broker, "e1")
    await load(broker, commands, "e1", DOGS)
    await enqueue(broker, "unloaded", adapter=CATS)
    assert await ids(broker, "e0") == ["unloaded"]
    await die(broker, "e1", external=True)
    await enqueue(broker, "dead", adapter=DOGS)
    assert await ids(broker, "e0") == ["dead"]


@pytest.mark.usefixtures("patient_engines")
async def test_adapter_reports_of_an_engine_expire(broker: Broker, commands: CommandConnection) -> None:
    for engine in ("e0", "e1"):
        await look(broker, engine)
    await load(broker, commands, "e1", CATS, ttl_ms=1)
    async with asyncio.timeout(DEADLINE_S):
        while (await read_snapshot(commands, broker.keys)).of("adapter"):
            await asyncio.sleep(0.01)
    await enqueue(broker, "cat", adapter=CATS)
    assert await ids(broker, "e0") == ["cat"]
    assert (await read_snapshot(commands, broker.keys)).kinds & {"adapter", "adapters_of"} == set()


@pytest.mark.usefixtures("patient_engines")
async def test_an_engine_with_the_adapter_claims_beyond_its_share(broker: Broker, commands: CommandConnection) -> None:
    """Otherwise each engine would leave the request to the other."""
    await look(broker, "e0")
    await load(broker, commands, "e1", CATS)
    await enqueue(broker, "first", adapter=CATS)
    assert await ids(broker, "e1") == ["first"]
    await look(broker, "e0")
    await enqueue(broker, "second", adapter=CATS)
    assert await ids(broker, "e1", 9, num_held=1) == ["second"]


async def test_an_engine_that_has_it_is_woken_before_an_emptier_one(
    broker: Broker, commands: CommandConnection, woken: Woken
) -> None:
    await look(broker, "e0")
    await look(broker, "e1", held=5)
    await look(broker, "e2", held=4)
    for engine in ("e1", "e2"):
        await load(broker, commands, engine, CATS)
    await enqueue(broker, "cat", adapter=CATS)
    assert await woken() == ["e2"]
    await enqueue(broker, "plain")
    assert await woken() == ["e0"]


async def test_each_adapter_report_replaces_the_previous_one(broker: Broker, commands: CommandConnection) -> None:
    await load(broker, commands, "e0", CATS, DOGS)
    await load(broker, commands, "e1", CATS)
    await load(broker, commands, "e0", DOGS)
    found = await read_snapshot(commands, broker.keys)
    assert {name: set(engines) for name, engines in found.of("adapter").items()} == {CATS: {"e1"}, DOGS: {"e0"}}
    await load(broker, commands, "e0")
    found = await read_snapshot(commands, broker.keys)
    assert (set(found.of("adapter")), set(found.of("adapters_of"))) == ({CATS}, {"e1"})
