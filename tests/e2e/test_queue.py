"""The queue as its users meet it: with a worker that serves from it."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
import redis.asyncio

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta

from ..gate import Gate
from ..processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

PROMPT = "count from four to nine:"
NUM_TOKENS = 300
LONG = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# A worker alone makes a little over four (looks for dead engines, heartbeats, leases), the
# clients that other tests have left open one or two; a worker that polls would make twenty and more.
MAX_IDLE_CALLS_PER_S = 10


async def test_an_abandoned_answer_is_stopped_and_keeps_its_tokens(client: Client, gate: Gate) -> None:
    gate.hold_at(NUM_TOKENS - 1)
    for timeout_s in (1.0, 5.0, 60.0):  # the shortest in which this machine gives a token
        deltas = [delta async for delta in client.stream(PROMPT, LONG, timeout_s=timeout_s)]
        if deltas[-1].next_index:
            break
    gate.open()
    assert [delta.finish_reason for delta in deltas if delta.finished] == ["expired"]
    num_tokens = deltas[-1].next_index
    assert 0 < num_tokens < NUM_TOKENS
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.num_output_tokens == num_tokens
    whole = await client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == whole.text


async def test_a_paused_generation_resumes_after_its_last_token(client: Client, gate: Gate) -> None:
    whole = await client.generate(PROMPT, LONG)
    gate.hold_at(NUM_TOKENS - 1)
    deltas: list[Delta] = []

    async def follow() -> None:
        async for delta in client.stream(PROMPT, LONG):
            deltas.append(delta)  # noqa: PERF401  # the test looks at them meanwhile

    following = asyncio.create_task(follow())
    async with asyncio.timeout(DEADLINE_S):
        while not deltas:
            await asyncio.sleep(0.01)
    await client.pause_generation()
    num_before = deltas[-1].next_index
    assert num_before < NUM_TOKENS
    assert (await client.queue_stats()).num_returned == 1
    # Deltas published when the pause came may still be on their way to us.
    num_paused = -1
    while deltas[-1].next_index != num_paused:
        num_paused = deltas[-1].next_index
        await asyncio.sleep(0.3)
    assert num_paused < NUM_TOKENS
    assert not following.done()
    gate.open()
    await client.resume_generation()
    await following
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.index for delta in deltas][1:] == [delta.next_index for delta in deltas][:-1]


async def test_an_idle_worker_costs_redis_little(deployment: LocalStack, client: Client) -> None:
    """Supervisor and worker process are counted together; commands of scripts inside Redis are not."""
    await client.generate(PROMPT)
    calls: list[str] = []
    async with redis.asyncio.Redis.from_url(deployment.url) as connection, connection.monitor() as monitor:
        # Supervisors sum budgets each second once one was set, as another test of this deployment may have done.
        await connection.delete(Keys().budgets())
        started = time.monotonic()
        while (left_s := started + 6 - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    calls.append(str(await monitor.next_command()))
            except TimeoutError:
                break
    from_outside = [call for call in calls if not re.search(r"'client_type': 'lua'", call)]
    assert from_outside
    assert len(from_outside) / 6 < MAX_IDLE_CALLS_PER_S, from_outside


async def test_the_small_tenant_does_not_wait_behind_the_large_one(client: Client, gate: Gate) -> None:
    gate.let_end(100)  # else the flood might be over before the test looks
    flood = await client.submit_many([PROMPT] * 400, SamplingParams(max_tokens=40, ignore_eos=True), tenant="large")
    small = await client.generate(PROMPT, SamplingParams(max_tokens=1), tenant="small")
    assert small.outputs[0].finish_reason == "length"
    stats = await client.queue_stats()
    (large,) = (tenant for tenant in stats.tenants if tenant.tenant == "large")
    assert large.depth > 200
    assert await client.purge("large") > 0
    gate.open()
    await asyncio.gather(*(handle.result() for handle in flood))
