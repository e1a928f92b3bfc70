"""Several engines: each is left its part of what waits, so that all are filled alike."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.shared.broker import Broker, EngineCapacity

from ..conftest import die, enqueue
from ..engine import PATIENCE_S, Engine, pass_patience, small, teach


def engines_of(broker: Broker, *sizes: int, of: str) -> list[Engine]:
    """Engines of so many sequences, or of so many tokens of cache, and as much of the other as they like."""
    if of == "max_num_seqs":
        return [Engine(broker, f"e{i}", max_num_seqs=size) for i, size in enumerate(sizes)]
    return [Engine(broker, f"e{i}", num_kv_tokens=size) for i, size in enumerate(sizes)]


@pytest.mark.usefixtures("patient_engines")
@pytest.mark.parametrize("of", ["max_num_seqs", "num_kv_tokens"])
@pytest.mark.parametrize("max_tokens", [1, 4000])
@pytest.mark.parametrize("num_requests", [6, 12])
async def test_engines_get_their_parts_in_proportion(
    broker: Broker, of: str, max_tokens: int, num_requests: int
) -> None:
    """Measure parts by sequences or cache, whichever is scarcer, and by expected rather than requested output."""
    await teach(broker, num_output=1)
    engines = engines_of(broker, 1000, 500, of=of)
    for engine in engines:
        assert await engine.claim() == []
    ids = [f"r{i}" for i in range(num_requests)]
    await enqueue(broker, *ids, num_prompt_tokens=9, max_tokens=max_tokens)
    waves = [await engine.claim() for engine in engines]
    assert [len(wave) for wave in waves] == [num_requests * 2 // 3, num_requests // 3]
    assert sorted(waves[0] + waves[1]) == sorted(ids)


@pytest.mark.usefixtures("patient_engines")
@pytest.mark.parametrize("of", ["max_num_seqs", "num_kv_tokens"])
async def test_an_engine_that_holds_less_gets_more(broker: Broker, of: str) -> None:
    busy, idle = engines_of(broker, 1000, 1000, of=of)
    await small(broker, *[f"first{i}" for i in range(6)])
    assert len(await busy.claim()) == 6
    assert await idle.claim() == []
    await small(broker, *[f"r{i}" for i in range(8)])
    assert len(await busy.claim()) == 1
    assert len(await idle.claim()) == 7


@pytest.mark.usefixtures("patient_engines")
async def test_nothing_is_left_to_an_engine_that_has_withdrawn(broker: Broker, commands) -> None:
    first, other = engines_of(broker, 10, 10, of="max_num_seqs")
    for engine in (first, other):
        await engine.claim()
    for kind in ("reserved", "ward"):
        await commands.execute("SET", broker.keys.prefix + kind, other.name)
    await broker.withdraw(other.name)
    await broker.withdraw(first.name + "-unknown")
    assert await commands.execute("EXISTS", broker.keys.prefix + "reserved", broker.keys.prefix + "ward") == 0
    assert await commands.execute("ZSCORE", broker.keys.leases, other.name) is not None
    await small(broker, *[f"r{i}" for i in range(6)])
    assert len(await first.claim()) == 6
    # Its next claim brings it back.
    assert await other.claim() == []
    await small(broker, *[f"s{i}" for i in range(6)])
    assert len(await first.claim()) < 6


async def test_any_engine_may_claim_the_shares_of_others_after_a_delay(broker: Broker) -> None:
    """The claim returns the delay."""
    first, other = engines_of(broker, 10, 10, of="max_num_seqs")
    for engine in (first, other):
        await engine.claim()
    await enqueue(broker, "a")
    await pass_patience()
    await small(broker, "b", "c")
    wave = await first.look()
    # It leaves the last of three to the other engine, for as long as that is new.
    assert [claim.request_id for claim in wave.claims][:2] == ["a", "b"]
    deadline = time.monotonic() + 60
    while len(first.held) < 3:
        assert 0 < wave.retry_ms <= 1000 * PATIENCE_S
        assert time.monotonic() < deadline
        await asyncio.sleep(wave.retry_ms / 1000)
        wave = await first.look()


@pytest.mark.usefixtures("patient_engines")
async def test_until_then_they_are_left_to_the_others(broker: Broker) -> None:
    first, other = engines_of(broker, 10, 10, of="max_num_seqs")
    for engine in (first, other):
        await engine.claim()
    await small(broker, *[f"r{i}" for i in range(8)])
    assert len(await first.claim()) == 4
    wave = await first.look()
    assert wave.claims == []
    assert 30_000 < wave.retry_ms <= 60_000
    assert len(await other.claim()) == 4


@pytest.mark.usefixtures("patient_engines")
@pytest.mark.parametrize("end", ["death", "lease"])
async def test_stopped_or_not_yet_started_engines_get_no_share(broker: Broker, end: str) -> None:
    (first,) = engines_of(broker, 10, of="max_num_seqs")
    await first.claim()
    await broker.claim("gone", EngineCapacity(max_num_seqs=10), lease_ttl_ms=1 if end == "lease" else 60_000)
    if end == "death":
        await die(broker, "gone", external=True)
    else:
        await asyncio.sleep(0.005)
    # It holds a lease, but nobody knows of any room it has.
    await broker.renew("starting", [])
    await small(broker, *[f"r{i}" for i in range(8)])
    assert len(await first.claim()) == 8


async def test_engines_that_are_full_leave_nothing_to_each_other(broker: Broker) -> None:
    engines = engines_of(broker, 4, 4, of="max_num_seqs")
    for engine in engines:
        await engine.claim()
    await small(broker, *[f"r{i}" for i in range(20)])
    for engine in engines:
        assert len(await engine.claim()) == 4
    await engines[0].end(engines[0].held[0].request_id)
    assert len(await engines[0].claim()) == 1
