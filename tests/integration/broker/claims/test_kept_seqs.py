"""The last sequences of an engine are for tenants that have less than an equal part, while tenants share the model."""

from __future__ import annotations

from penstock.shared.broker import Broker, Claim, EngineCapacity

from ..conftest import enqueue


async def take(broker: Broker, num_held: int = 0) -> list[Claim]:
    room = EngineCapacity(max_num_seqs=8, num_seqs=num_held, num_kept_seqs=2)
    return (await broker.claim("e0", room)).claims


async def test_one_tenant_alone_gets_every_sequence(broker: Broker) -> None:
    await enqueue(broker, *(f"f{number}" for number in range(20)), tenant="flood", num_prompt_tokens=1)
    assert len(await take(broker)) == 8


async def test_a_newcomer_finds_a_sequence_and_the_others_leave_it_one(broker: Broker) -> None:
    await enqueue(broker, "s0", tenant="small", num_prompt_tokens=1)
    await enqueue(broker, *(f"f{number}" for number in range(20)), tenant="flood", num_prompt_tokens=1)
    first = await take(broker)
    assert sorted(claim.request_id for claim in first) == ["f0", "f1", "f2", "f3", "f4", "s0"]
    # The flood has its part of the engine, and more: nobody else asks, so the last two stay free.
    assert await take(broker, 6) == []
    # What has less than its part gets them, though something of it runs.
    await enqueue(broker, "s1", "s2", "s3", tenant="small", num_prompt_tokens=1)
    assert [claim.request_id for claim in await take(broker, 6)] == ["s1", "s2"]


async def test_a_tenant_with_its_part_leaves_the_last_sequences_to_others(broker: Broker) -> None:
    await enqueue(broker, *(f"a{number}" for number in range(20)), tenant="a", num_prompt_tokens=1)
    await enqueue(broker, *(f"b{number}" for number in range(20)), tenant="b", num_prompt_tokens=1)
    assert sorted(claim.request_id[0] for claim in await take(broker)) == ["a"] * 3 + ["b"] * 3
    # Three of eight each are equal parts for them and one who comes.
    assert await take(broker, 6) == []
    await enqueue(broker, "c0", tenant="c", num_prompt_tokens=1)
    assert [claim.request_id for claim in await take(broker, 6)] == ["c0"]


async def test_sequences_are_kept_no_longer_than_a_minute(broker: Broker, commands) -> None:
    await enqueue(broker, *(f"f{number}" for number in range(20)), tenant="flood", num_prompt_tokens=1)
    await enqueue(broker, "s0", tenant="small", num_prompt_tokens=1)
    await broker.cancel("s0")
    assert len(await take(broker)) == 6
    queue = broker.keys.prefix + "queue"
    shared_at = int(await commands.execute("HGET", queue, "shared_at"))
    await commands.execute("HSET", queue, "shared_at", shared_at - 60_000)
    assert len(await take(broker, 6)) == 2
