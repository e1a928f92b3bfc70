"""A call that is about many requests leaves what as many calls about one each would leave, even if it is stopped."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.shared.broker import NEW, Broker, Entry, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys, ModelKeys
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

from .conftest import TTL_MS, assert_nothing_is_left, enqueue, final, held, record, take
from .snapshot import Snapshot, read_snapshot

TENANTS, BANDS = ("t", "u", "v"), ("interactive", "standard", "batch")
OTHERWISE_COMPARED = {"events", "request", "usage", "leases", "clients", "deadlines", "rooms", "vacant", "series"}
BY_CLOCK = (
    *("rate_at", "rate_ms", "rate_requests", "rate_tokens", "rate_held_ms", "rate_ended_ms", "held_at", "shared_at"),
    "idle_at",
    *(f"rate:{band}" for band in BANDS),
)


def _entries(drawn: random.Random, num: int) -> list[Entry]:
    return [
        Entry(
            request_id=f"r{number}",
            payload=b"payload" * number,
            result_ttl_ms=TTL_MS,
            tenant=drawn.choice(TENANTS),
            band=drawn.choice(BANDS),
            num_prompt_tokens=drawn.randint(1, 9),
            max_tokens=drawn.randint(0, 9),
            client_id=drawn.choice(["", "c", "d"]),
            client_ttl_ms=600_000,
            fail_fast=drawn.random() < 0.3,
            timeout_ms=drawn.choice([None, 600_000]),
            call=f"call{number}",
        )
        for number in range(num)
    ]


async def _live(
    commands: CommandConnection, keys: ModelKeys, seed: int, *, many: bool
) -> tuple[list[str], list[Snapshot]]:
    """Enqueue, claim and end, many requests with a call or one; returns the order of claims, and what there was."""
    drawn, broker, queue = random.Random(seed), Broker(commands, keys), Queue(commands, keys)
    await queue.configure(QueuePolicy(tenant=TenantPolicy(tokens_per_minute=10_000), ageing_s=None))
    await queue.configure_tenant("u", TenantPolicy(weight=3.0))
    assert await take(broker, "e0", 1) == []  # what fails fast needs an engine
    entries, claims, seen = _entries(drawn, 40), [], list[Snapshot]()
    size = len(entries) if many else 1
    for start in range(0, len(entries), size):
        assert await broker.enqueue_many(entries[start : start + size]) == [NEW] * size
    seen.append(await read_snapshot(commands, keys))
    while len(claims) < 30:
        claims += await take(broker, "e0", 30 if many else 1, num_held=len(claims))
    seen.append(await read_snapshot(commands, keys))
    most = {entry.request_id: entry.max_tokens for entry in entries}
    # No less than was charged: what is given back of one is taken off what is owed for another, if they end together.
    lens = {one.request_id: most[one.request_id] + drawn.randint(0, 5) for one in claims[:20]}
    ends = [final(one.request_id, one.epoch, 0, *range(lens[one.request_id])) for one in claims[:20]]
    for start in range(0, len(ends), size):
        assert await broker.finish(ends[start : start + size]) == []
    seen.append(await read_snapshot(commands, keys))
    return [claim.request_id for claim in claims], seen


def _comparable(found: Snapshot) -> dict[str, Any]:
    """All that is known but for what the clock says."""
    kept: dict[str, Any] = {}
    for kind in found.kinds - OTHERWISE_COMPARED:
        for name, value in found.of(kind).items():
            kept[f"{kind}:{name}"] = value
    queue = {field: value for field, value in kept.pop("queue:").items() if field not in BY_CLOCK}
    kept["queue"] = {field: value for field, value in queue.items() if not field.startswith(("clock", "mean", "room"))}
    kept["clocks"] = {
        field: round(float(value), 6) for field, value in queue.items() if field.startswith(("clock", "mean"))
    }
    for name in [name for name in kept if name.startswith(("ready:", "idle:"))]:
        kept[name] = {tenant: round(time, 6) for tenant, time in kept[name].items()}
    for name in [name for name in kept if name.startswith(("heads:", "lane:", "claims:"))]:
        value = kept.pop(name)
        kept[name] = sorted(value) if isinstance(value, dict) else [request_id for _, request_id in value]
    for name in [name for name in kept if name.startswith("due:")]:
        kept[name] = len(kept[name])
    rows = [row.split(b"\n") for row in kept.get("ledger:rows", [])]
    kept["ledger:rows"] = [(used, *rest) for used, _, *rest in rows]  # without its time
    kept["states"] = {name: hash_["state"] for name, hash_ in found.of("request").items()}
    kept["prompts"] = {name: (hash_["prompt"], hash_["count"]) for name, hash_ in found.of("request").items()}
    kept["deadlines"] = sorted(found.one("deadlines"))
    kept["usage"] = {name: (of["requests"], of["tokens"]) for name, of in found.of("usage").items()}
    return kept


@pytest.mark.parametrize("seed", range(4))
async def test_batched_calls_leave_the_same_state_as_single_calls(
    commands: CommandConnection, namespace: str, seed: int
) -> None:
    found = []
    for model, many in (("many", True), ("one", False)):
        found.append(await _live(commands, Keys(namespace).model(model), seed, many=many))
    (order, seen), (expected_order, expected) = found
    assert order == expected_order
    for now, then in zip(seen, expected, strict=True):
        assert _comparable(now) == _comparable(then)


async def test_ended_requests_are_settled_when_a_later_call_of_the_batch_fails(
    commands: CommandConnection, broker: Broker
) -> None:
    """The outbox, which the second one needs, is no stream."""
    await enqueue(broker, "a", client_id="c", client_ttl_ms=600_000)
    await enqueue(broker, "b", webhook="w")
    await enqueue(broker, "c")
    await take(broker, "e0", 3)
    await commands.execute("SET", broker.keys.outbox, "x")
    await broker.finish([final(request_id, 1, 0) for request_id in "abc"])
    assert [await broker.state(request_id) for request_id in "abc"] == ["finished"] * 3
    found = await read_snapshot(commands, broker.keys)
    assert found.of("claims").get("e0", {}).keys() <= {"b"}
    assert found.of("payload").keys() <= {"b"}
    assert found.of("client") == {}


async def test_enqueued_requests_are_served_when_a_later_call_of_the_batch_fails(
    commands: CommandConnection, broker: Broker
) -> None:
    """The second one's lane is no stream; the call is repeated after the repair."""
    await take(broker, "e0", 1)
    await enqueue(broker, "lost", tenant="u")
    await commands.execute("DEL", broker.keys.lane("standard", "u"))
    await commands.execute("SET", broker.keys.lane("standard", "u"), "x")
    life = {"payload": b"p", "result_ttl_ms": TTL_MS, "client_id": "c", "client_ttl_ms": 600_000, "fail_fast": True}
    entries = [
        Entry(request_id="a", call="1", tenant="t", timeout_ms=600_000, **life),
        Entry(request_id="b", call="2", tenant="u", timeout_ms=600_000, **life),
    ]
    assert await broker.enqueue_many(entries) == [NEW, NEW]
    found = await read_snapshot(commands, broker.keys)
    assert found.of("client") == {"c": {"a", "b"}}
    assert found.one("fail_fast") == found.one("deadlines").keys() == {"a", "b"}
    assert found.one("queue")["depth:standard"] == "2"
    assert {claim.request_id for claim in await take(broker, "e0", 9)} == {"a", "b"}


async def test_an_id_that_a_call_has_twice_is_enqueued_once(broker: Broker) -> None:
    entries = [
        Entry(request_id="a", payload=payload, result_ttl_ms=TTL_MS, call=call)
        for payload, call in ((b"1", "x"), (b"2", "x"), (b"3", "y"))
    ]
    assert await broker.enqueue_many(entries) == [NEW, NEW, "queued"]
    assert [claim.payload for claim in await take(broker, "e0", 9)] == [b"1"]


async def test_a_claim_reads_past_entries_that_cannot_run(commands: CommandConnection, broker: Broker) -> None:
    """Foreign and expired entries are between the others, also after the part that was read ahead."""
    await enqueue(broker, *(f"a{number}" for number in range(7)))
    lane = broker.keys.lane("standard", "default")
    await commands.execute("XADD", lane, "*", "id", "nobody", "request", "x")
    await enqueue(broker, "due", timeout_ms=1)
    await enqueue(broker, *(f"b{number}" for number in range(30)))
    await commands.execute("ZREM", broker.keys.prefix + "deadlines", "due")  # it is met in its lane
    await commands.execute("HSET", broker.keys.request("due"), "deadline", 1)
    claims = await take(broker, "e0", 33)
    assert [claim.request_id for claim in claims] == [*(f"a{n}" for n in range(7)), *(f"b{n}" for n in range(26))]
    assert await broker.state("due") == "expired"
    claims += await take(broker, "e0", 33, num_held=33)
    assert [claim.request_id for claim in claims[33:]] == ["b26", "b27", "b28", "b29"]
    assert await broker.append([record(claim.request_id, claim.epoch, 0, 7) for claim in claims]) == []
    assert await broker.finish([final(claim.request_id, claim.epoch, 1) for claim in claims]) == []
    await assert_nothing_is_left(commands, broker)


async def test_a_repeated_end_is_distinguished_from_a_stale_one(broker: Broker) -> None:
    await enqueue(broker, "a", "b", "c")
    await take(broker, "e0", 3)
    assert await broker.finish([final("a", 1, 0)]) == []
    assert await broker.release([held("b", 1)]) == 1
    assert await broker.finish([final(request_id, 1, 0) for request_id in "abc"]) == ["b"]
    assert [await broker.state(request_id) for request_id in "abc"] == ["finished", "queued", "finished"]
