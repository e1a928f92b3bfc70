"""Waves: what an engine is handed fits its cache, and a large request gets the room it needs."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from penstock.shared.broker import Broker, Claim

from ..conftest import die, enqueue, record
from ..engine import Engine, large, pass_patience, small, teach


@pytest.mark.parametrize("seed", range(5))
async def test_a_wave_fits_the_cache(broker: Broker, seed: int) -> None:
    """Count held and newly claimed requests together; the next request is claimed if it fits."""
    rng, prompts = random.Random(seed), {}
    for number in range(40):
        prompts[f"r{number}"] = rng.randint(1, 50)
        await enqueue(broker, f"r{number}", num_prompt_tokens=prompts[f"r{number}"], max_tokens=1)
    engine, waiting = Engine(broker, "e0", num_kv_tokens=100), list(prompts)
    while waiting:
        wave = await engine.claim()
        assert wave == waiting[: len(wave)]
        del waiting[: len(wave)]
        assert engine.num_held_kv_tokens <= 100
        assert not waiting or engine.num_held_kv_tokens + prompts[waiting[0]] + 1 > 100
        await engine.end(*rng.sample([c.request_id for c in engine.held], rng.randint(1, len(engine.held))))


async def test_cache_use_is_estimated_with_half_of_the_expected_output(broker: Broker) -> None:
    await teach(broker, num_output=40)
    await enqueue(broker, "a", num_prompt_tokens=100, max_tokens=1000)
    await enqueue(broker, "b", num_prompt_tokens=100, max_tokens=10)
    wave = await Engine(broker, "e0").look()
    assert [(claim.request_id, claim.num_kv_tokens) for claim in wave.claims] == [("a", 120), ("b", 105)]


async def test_cache_use_of_a_requeued_request_includes_its_logged_tokens(broker: Broker) -> None:
    await teach(broker, num_output=40)
    await enqueue(broker, "a", num_prompt_tokens=100, max_tokens=1000)
    for expected in (120, 150 + 1):
        engine = Engine(broker, "e0", num_kv_tokens=1000)
        (claim,) = (await engine.look()).claims
        assert claim.num_kv_tokens == expected
        await log_tokens(broker, claim, 50)
        await broker.release([("a", claim.epoch)])


async def log_tokens(broker: Broker, claim: Claim, num_tokens: int) -> None:
    assert await broker.append([record("a", claim.epoch, claim.num_logged_tokens, *range(num_tokens))]) == []


async def test_an_empty_engine_claims_a_request_larger_than_its_cache(broker: Broker) -> None:
    """Only the engine can decide that a request can never run there, so the request must not wait for ever."""
    await enqueue(broker, "huge", num_prompt_tokens=5000, max_tokens=1)
    await small(broker, "a")
    engine = Engine(broker, "e0", num_kv_tokens=100)
    assert await engine.claim() == ["huge"]
    assert engine.held[0].num_kv_tokens == 100
    await engine.end("huge")
    assert await engine.claim() == ["a"]


@pytest.mark.parametrize("tenants", [("t", "t"), ("t", "u")], ids=["same lane", "other tenant"])
async def test_small_requests_do_not_starve_a_large_one(broker: Broker, tenants: tuple[str, str]) -> None:
    """The engine claims no later request, so that it drains until the large one fits."""
    of_large, of_small = tenants
    engine = Engine(broker, "e0", num_kv_tokens=100)
    await small(broker, *[f"first{i}" for i in range(10)], tenant=of_small)
    assert len(await engine.claim()) == 10
    await large(broker, "large", tenant=of_large)
    await small(broker, *[f"later{i}" for i in range(30)], tenant=of_small)
    started: list[str] = []
    for number in range(10):
        await engine.end(f"first{number}")
        started += await engine.claim()
        # However little room there is, small ones would fit in it.
        if "large" not in started:
            assert engine.num_held_kv_tokens + 80 > 100
    assert started[0] == "large"


async def test_other_engines_skip_a_lane_for_which_one_engine_reserves_its_cache(broker: Broker) -> None:
    """The other engine serves other lanes, but no later request of the lane that the first one reserves for."""
    draining, other = Engine(broker, "e0", num_kv_tokens=100), Engine(broker, "e1", num_kv_tokens=100)
    await small(broker, *[f"first{i}" for i in range(20)])
    await fill(draining)
    await fill(other)
    await large(broker, "large", tenant="t")
    await small(broker, "behind", tenant="t")
    await small(broker, *[f"u{i}" for i in range(20)], tenant="u")
    await pass_patience()
    started: list[str] = []
    while not started:
        assert draining.num_held_kv_tokens + 80 > 100
        await draining.end(draining.held[0].request_id)
        await other.end(other.held[0].request_id)
        started = await draining.claim()
        assert [name[0] for name in await other.claim()] == ["u"]
    assert started[0] == "large"


async def test_a_cache_reservation_ends_with_its_engine(broker: Broker) -> None:
    """Another engine takes over the reservation and the request."""
    draining, other = Engine(broker, "e0", num_kv_tokens=100), Engine(broker, "e1", num_kv_tokens=100)
    await small(broker, *[f"first{i}" for i in range(20)])
    await fill(draining)
    await fill(other)
    await large(broker, "large", tenant="t")
    await small(broker, *[f"u{i}" for i in range(20)], tenant="u")
    await pass_patience()
    assert await draining.claim() == []
    for request_id in [claim.request_id for claim in draining.held]:
        await broker.cancel(request_id)
    assert await die(broker, "e0", external=True) == (0, 0)
    for _ in range(7):
        await other.end(other.held[0].request_id)
        assert await other.claim() == []
    await other.end(other.held[0].request_id)
    assert (await other.claim())[0] == "large"


async def fill(engine: Engine) -> None:
    """Claim until nothing more fits, past what other engines would be left."""
    deadline = time.monotonic() + 60
    while engine.num_held_kv_tokens < engine.num_kv_tokens:
        assert time.monotonic() < deadline
        await engine.claim()
        await asyncio.sleep(0.01)
