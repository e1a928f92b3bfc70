"""What clients see of a model with several partitions: the same as of one with one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.broker import Claim, EngineCapacity
from penstock.shared.deployment.records import DeathCause
from penstock.shared.errors import RequestConflictError, RequestNotFoundError, ValidationError
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.partitions import change, open_dead_letter
from penstock.shared.partitions.layout import choose_partition
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

from ..client.harness import claim_one, until_followed, write
from .conftest import MODEL, Connect, Parts, tenant_of

PARAMS = SamplingParams(max_tokens=4)
CAUSE = DeathCause(engine_id="e", reason="it fell over")


async def submit(client: Client, tenant: str, *names: str) -> None:
    for name in names:
        await client.submit("hi", PARAMS, tenant=tenant, request_id=name)


async def claim_all(parts: Parts, number: int) -> list[Claim]:
    return (await parts[number].claim("e", EngineCapacity(max_num_seqs=1000))).claims


def ids(claims: list[Claim]) -> list[str]:
    return [claim.request_id for claim in claims]


async def test_a_tenant_has_one_partition_in_which_its_requests_keep_their_order(client: Client, parts: Parts) -> None:
    await parts.grow(3)
    tenants = [f"tenant{number}" for number in range(12)]
    for number in range(4):
        await asyncio.gather(*(submit(client, tenant, f"{tenant}/{number}") for tenant in tenants))
    found: dict[str, list[tuple[int, str]]] = {}
    for number in range(3):
        for request_id in ids(await claim_all(parts, number)):
            found.setdefault(request_id.partition("/")[0], []).append((number, request_id))
    assert len({claimed[0][0] for claimed in found.values()}) == 3
    for tenant in tenants:
        home = found[tenant][0][0]
        assert found[tenant] == [(home, f"{tenant}/{number}") for number in range(4)]


async def test_tenants_of_a_partition_share_it(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    one = tenant_of(1, 2)
    other = tenant_of(1, 2, other_than=one)
    await submit(client, one, *(f"one{number}" for number in range(6)))
    await submit(client, other, "other0", "other1")
    first = ids((await parts[1].claim("e", EngineCapacity(max_num_seqs=4))).claims)
    assert {"other0", "other1"} <= set(first)


async def test_a_stream_of_a_request_in_another_partition(client: Client, parts: Parts) -> None:
    await parts.grow(2)

    async def answer() -> None:
        claim = await claim_one(parts[1])
        await write(parts[1], claim, 0, 5)
        await write(parts[1], claim, 1, 6, end=FinishReason.STOP)

    answering = asyncio.create_task(answer())
    tokens = [token async for delta in client.stream("hi", PARAMS, tenant=tenant_of(1, 2)) for token in delta.token_ids]
    await answering
    assert tokens == [5, 6]


async def test_another_process_finds_a_request_by_its_id(client: Client, connect: Connect, parts: Parts) -> None:
    await parts.grow(3)
    await submit(client, tenant_of(2, 3), "x", "y")
    other = await connect()
    assert (await other.status("x")).state is RequestState.QUEUED
    assert (await other.status("y")).position == 1
    await other.cancel("y")
    claim = await claim_one(parts[2])
    await write(parts[2], claim, 0, 5, 6)
    await write(parts[2], claim, 2, 7, end=FinishReason.STOP)
    handle = await other.handle("x")
    assert (await handle.result()).outputs[0].token_ids == [5, 6, 7]
    assert [delta.token_ids async for delta in handle.stream(after=1)] == [[7]]
    assert (await (await other.handle("y")).result()).outputs[0].finish_reason == FinishReason.CANCELLED
    with pytest.raises(RequestNotFoundError):
        await (await other.handle("z")).result()


async def test_growth_puts_no_request_of_a_tenant_before_an_earlier_one(
    client: Client, connect: Connect, parts: Parts
) -> None:
    tenant = tenant_of(1, 2, before=(0, 1))
    await submit(client, tenant, "a", "b")
    await parts.grow(2)
    # One process has heard of no change, the other of nothing else: both stand behind what waits.
    await submit(client, tenant, "c")
    other = await connect()
    await submit(other, tenant, "d")
    assert ids(await claim_all(parts, 1)) == []
    assert ids(await claim_all(parts, 0)) == ["a", "b", "c", "d"]
    await submit(client, tenant, "e")
    await submit(other, tenant, "f")
    assert ids(await claim_all(parts, 0)) == []
    assert ids(await claim_all(parts, 1)) == ["e", "f"]


async def test_a_tenant_with_a_quota_stays_while_something_of_it_runs(client: Client, parts: Parts) -> None:
    tenant = tenant_of(1, 2, before=(0, 1))
    await client.configure_tenant(tenant, TenantPolicy(max_concurrent_requests=1))
    await submit(client, tenant, "a")
    (claim,) = await claim_all(parts, 0)
    await parts.grow(2)
    await submit(client, tenant, "b")
    assert ids(await claim_all(parts, 1)) == []
    await write(parts[0], claim, 0, 5, end=FinishReason.STOP)
    assert ids(await claim_all(parts, 0)) == ["b"]


async def test_an_id_of_before_the_growth_attaches_to_its_request(
    client: Client, connect: Connect, parts: Parts
) -> None:
    tenant = tenant_of(1, 2, before=(0, 1))
    await submit(client, tenant, "a")
    await claim_all(parts, 0)
    await parts.grow(2)
    for one in (client, await connect()):
        await submit(one, tenant, "a")
    await submit(client, tenant, "b")  # of which nothing waits in the former one
    for one in (client, await connect()):
        await submit(one, tenant, "a")
    assert [ids(await claim_all(parts, number)) for number in range(2)] == [[], ["b"]]


async def test_a_stream_attaches_to_a_request_that_another_partition_has(client: Client, parts: Parts) -> None:
    tenant = tenant_of(1, 2, before=(0, 1))
    await submit(client, tenant, "a")
    (claim,) = await claim_all(parts, 0)
    await parts.grow(2)
    stream = client.stream("hi", PARAMS, tenant=tenant, request_id="a")
    await write(parts[0], claim, 0, 5)
    assert (await anext(stream)).token_ids == [5]
    following = asyncio.create_task(anext(stream))
    await until_followed(parts.commands, parts[0], claim)
    await write(parts[0], claim, 1, 6, end=FinishReason.STOP)
    assert (await following).token_ids == [6]
    await stream.aclose()


async def test_the_layout_is_written_again_to_a_partition_that_lost_its_data(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    tenant = tenant_of(1, 2)
    await submit(client, tenant, "a")
    await parts.commands.execute("DEL", parts[1].keys.prefix + "layout")
    await submit(client, tenant, "b")
    assert ids(await claim_all(parts, 1)) == ["a", "b"]


async def test_a_tenant_that_is_spread_goes_to_all_partitions(client: Client, parts: Parts) -> None:
    await parts.grow(2, ["big"])
    await submit(client, "big", *(f"r{number}" for number in range(20)))
    found = [ids(await claim_all(parts, number)) for number in range(2)]
    assert all(found)
    assert sorted(found[0] + found[1]) == sorted(f"r{number}" for number in range(20))
    assert (await client.status("r7")).state is RequestState.CLAIMED


async def test_a_session_of_a_tenant_that_is_spread_has_one_partition(client: Client, parts: Parts) -> None:
    await parts.grow(2, ["big"])
    for number in range(6):
        for session in ("s0", "s1", "s2", "s3"):
            name = f"{session}/{number}"
            await client.submit("hi", PARAMS, tenant="big", request_id=name, session_id=session)
    found = [{request_id[:2] for request_id in ids(await claim_all(parts, number))} for number in range(2)]
    assert all(found)
    assert sorted([*found[0], *found[1]]) == ["s0", "s1", "s2", "s3"]


async def test_the_queue_is_that_of_the_whole_model(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    tenants = [tenant_of(number, 2) for number in range(2)]
    for tenant in tenants:
        await submit(client, tenant, f"{tenant}/0", f"{tenant}/1", f"{tenant}/2")
    (claim,) = (await parts[1].claim("e", EngineCapacity(max_num_seqs=1))).claims
    stats = await client.queue_stats()
    assert (stats.model, stats.depth, stats.num_running) == (MODEL, 5, 1)
    assert {tenant.tenant: tenant.depth for tenant in stats.tenants} == {tenants[0]: 3, tenants[1]: 2}
    await client.pause_generation()
    assert [ids(await claim_all(parts, number)) for number in range(2)] == [[], []]
    assert (await client.queue_stats()).num_returned == 1
    assert await client.purge(tenants[0]) == 3
    await client.resume_generation()
    assert ids(await claim_all(parts, 1))[0] == claim.request_id
    await client.configure_queue(QueuePolicy(bands=("standard",)))
    with pytest.raises(ValidationError, match="band must be one of standard"):
        await client.submit("hi", PARAMS, tenant=tenants[1], band="batch")


async def test_a_new_partition_has_the_policies_and_the_pause_of_the_model(client: Client, parts: Parts) -> None:
    tenant = tenant_of(1, 2)
    await client.configure_queue(QueuePolicy(bands=("standard", "low")))
    await client.configure_tenant(tenant, TenantPolicy(max_concurrent_requests=1))
    await client.pause_generation()
    await parts.grow(2)
    await submit(client, tenant, "a", "b")
    assert ids(await claim_all(parts, 1)) == []
    await client.resume_generation()
    assert ids(await claim_all(parts, 1)) == ["a"]


async def test_parked_requests_of_all_partitions_are_listed_and_replayed(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    for number in range(2):
        await submit(client, tenant_of(number, 2), f"r{number}")
        (claim,) = await claim_all(parts, number)
        await parts[number].park(claim, CAUSE, "poison_request", "no engine can run it")
    letter = await open_dead_letter(parts.commands, parts.keys, MODEL)
    assert [parked.request_id for parked in await letter.list()] == ["r0", "r1"]
    assert await letter.replay("r1")
    assert ids(await claim_all(parts, 1)) == ["r1"]
    assert await letter.purge("r0")
    assert await letter.count() == 0


async def test_partitions_that_go_away_are_served_to_their_end(client: Client, connect: Connect, parts: Parts) -> None:
    """Order and quotas hold for the remaining requests, even for processes with an old layout."""
    waits, runs, idle = [name for name in map("tenant{}".format, range(100)) if choose_partition(name, 2) == 1][:3]
    await client.configure_tenant(runs, TenantPolicy(max_concurrent_requests=1))
    await parts.grow(2)
    await submit(client, runs, "r0")
    (running,) = await claim_all(parts, 1)
    await submit(client, waits, "w0", "w1")
    other = await connect()
    await other.status("w0")
    await parts.grow(1)
    await submit(client, waits, "w2")
    await submit(other, waits, "w3")
    await submit(other, runs, "r1")
    await submit(client, idle, "i0")
    assert ids(await claim_all(parts, 0)) == ["i0"]
    claims = await claim_all(parts, 1)
    assert [claim.request_id for claim in claims] == ["w0", "w1", "w2", "w3"]
    assert (await client.queue_stats()).depth == 1
    await write(parts[1], running, 0, 5, end=FinishReason.STOP)
    assert ids(await claim_all(parts, 1)) == ["r1"]
    await submit(other, waits, "w4")
    assert ids(await claim_all(parts, 0)) == ["w4"]
    assert (await (await (await connect()).handle("r0")).result()).outputs[0].token_ids == [5]


async def test_emptied_partitions_are_no_longer_searched_and_may_return(client: Client, parts: Parts) -> None:
    tenant = tenant_of(1, 2)
    await parts.grow(2)
    await submit(client, tenant, "a", "b")
    await parts.grow(1)
    with pytest.raises(ValidationError, match="still have requests"):
        await parts.grow(3)
    (first, second) = await claim_all(parts, 1)
    await write(parts[1], first, 0, 5, end=FinishReason.STOP)
    await parts[1].park(second, CAUSE, "poison_request", "no engine can run it")
    for name in ("a", "b"):
        await parts.grow(1)
        assert parts.layout.num_known == 2
        await parts[1].forget(name)
    letter = await open_dead_letter(parts.commands, parts.keys, MODEL)
    await letter.purge("b")
    await parts.grow(1)
    assert parts.layout.num_known == 1
    assert parts.layout.num_ever == 2
    await submit(client, tenant, "c")
    assert ids(await claim_all(parts, 0)) == ["c"]
    await submit(client, tenant, "d")
    await parts.grow(2)
    await submit(client, tenant, "e")
    assert ids(await claim_all(parts, 0)) == ["d", "e"]
    await submit(client, tenant, "f")
    assert ids(await claim_all(parts, 1)) == ["f"]


async def test_late_requests_to_a_removed_partition_are_served(
    client: Client, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant placed there only by its quota sends another request after the first check for remaining ones."""
    tenant = tenant_of(1, 2)
    await client.configure_tenant(tenant, TenantPolicy(requests_per_minute=10))
    await parts.grow(2)
    await submit(client, tenant, "a")
    (claim,) = await claim_all(parts, 1)
    await parts.grow(1)
    await write(parts[1], claim, 0, 5, end=FinishReason.STOP)
    await parts[1].forget("a")
    look = change._has_leftovers

    async def look_and_enqueue(*args: Any) -> bool:
        found = await look(*args)
        monkeypatch.setattr(change, "_has_leftovers", look)
        await submit(client, tenant, "b")
        return found

    monkeypatch.setattr(change, "_has_leftovers", look_and_enqueue)
    await parts.grow(1)
    assert parts.layout.num_known == 2
    assert (await client.status("b")).state is RequestState.QUEUED
    assert ids(await claim_all(parts, 1)) == ["b"]


async def test_partitions_are_not_changed_before_tenants_are_where_they_belong(client: Client, parts: Parts) -> None:
    tenant = tenant_of(1, 2, before=(0, 1))
    await submit(client, tenant, "a")
    await parts.grow(2)
    with pytest.raises(ValidationError, match=tenant):
        await parts.grow(3)
    (claim,) = await claim_all(parts, 0)
    await write(parts[0], claim, 0, 5, end=FinishReason.STOP)
    await parts.grow(3)
    assert (await client.status("a")).state is RequestState.FINISHED


async def test_a_change_that_was_cut_short_is_taken_up(
    client: Client, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home knows the new layout, and no partition does: whoever has heard of it waits."""
    tenant = tenant_of(1, 2)

    async def die(*_: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(change, "lay_out", die)
        with pytest.raises(ConnectionError):
            await parts.grow(2)
    enqueueing = asyncio.create_task(submit(client, tenant, "a"))
    await parts.grow(2)
    await enqueueing
    assert ids(await claim_all(parts, 1)) == ["a"]


async def test_the_id_of_a_request_in_another_partition_is_refused(client: Client, parts: Parts) -> None:
    await parts.grow(2)
    await submit(client, tenant_of(0, 2), "same")
    with pytest.raises(RequestConflictError) as caught:
        await submit(client, tenant_of(1, 2), "same")
    assert caught.value.field == "tenant"
    assert ids(await claim_all(parts, 0)) == ["same"]
    assert ids(await claim_all(parts, 1)) == []
