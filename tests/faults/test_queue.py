"""The queue's entries and their order outlive Redis, workers and clients."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.errors import QueueFullError
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

from .conftest import Start
from .watching import PROMPT

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


async def test_a_paused_and_full_queue_survives_every_restart(start: Start) -> None:
    stack = await start(1)
    async with Client.connect(stack.url, tenant="shop") as first:
        whole = await first.generate(PROMPT, LONG)
        await first.configure_queue(QueuePolicy(max_queue_depth=3, ageing_s=7.0))
        await first.configure_tenant("shop", TenantPolicy(weight=2.0, max_concurrent_requests=2))
        await first.pause_generation()
        for number in range(3):
            await first.submit(PROMPT, LONG, request_id=f"r{number}", band="batch", timeout_s=600)
    await asyncio.to_thread(stack.stop_worker)
    await asyncio.to_thread(stack.kill_redis)
    await asyncio.to_thread(stack.restart_redis)
    await asyncio.to_thread(stack.start_worker)
    async with Client.connect(stack.url, tenant="shop") as second:
        assert await second.is_paused()
        stats = await second.queue_stats()
        assert (stats.depth, stats.num_running) == (3, 0)
        assert [(t.tenant, t.weight, t.depth) for t in stats.tenants] == [("shop", 2.0, 3)]
        assert (await second.queue_policy()).ageing_s == 7.0
        assert [(await second.status(f"r{number}")).position for number in range(3)] == [0, 1, 2]
        with pytest.raises(QueueFullError):
            await second.submit(PROMPT, LONG)
        # The same id is the same request, for another client and after all of it.
        again = await second.submit(PROMPT, LONG, request_id="r1")
        assert (await second.queue_stats()).depth == 3
        await second.resume_generation()
        outputs = [await (await second.handle(f"r{number}")).result() for number in range(3)]
        assert {output.text for output in outputs} == {whole.text}
        assert (await again.result()).text == whole.text
        assert [(await second.status(f"r{number}")).num_attempts for number in range(3)] == [1, 1, 1]


async def test_requests_expire_while_no_engine_serves(start: Start) -> None:
    """The only supervisor is gone, and the request's client is the one who looks."""
    stack = await start(1)
    async with Client.connect(stack.url) as client:
        await asyncio.to_thread(stack.stop_worker)
        output = await client.generate(PROMPT, LONG, timeout_s=0.5)
        assert (output.text, output.outputs[0].finish_reason) == ("", "expired")
        # And one without a waiting caller, when there is a supervisor again.
        handle = await client.submit(PROMPT, LONG, timeout_s=0.1)
        await asyncio.to_thread(stack.start_worker)
        assert (await handle.result()).outputs[0].finish_reason == "expired"
        assert (await client.status(handle.request_id)).num_attempts == 0
