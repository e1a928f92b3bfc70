"""What clients and operators see of requests whose model shares a device: forecasts, and causes of events."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer import Client
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.partitions import open_history
from penstock.shared.queue.lifecycle import WAITING_FOR_WAKE, EventKind
from penstock.shared.queue.stats import ModelState

from ...gate import Gate
from ...processes import DEADLINE_S
from ..supervisor.conftest import run_worker
from .conftest import PARAMS, ShareDevice, texts_of

pytestmark = pytest.mark.slow


async def test_a_request_waits_for_its_model_and_returns_when_another_is_loaded(
    share_device: ShareDevice, commands: CommandConnection, redis_url: str, namespace: str, gate: Gate
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", "--max-wait", "standard=2")
        expected = await texts_of(client, ["two plus two is"], ["a"])

        while (await client.queue_stats("b")).readiness.in_s is None:
            await asyncio.sleep(0.02)
        readiness = (await client.queue_stats("b")).readiness
        assert readiness.state in (ModelState.ASLEEP, ModelState.UNLOADED)
        assert readiness.in_s is not None
        assert 0 < readiness.in_s < 60
        assert readiness.num_seqs > 0

        gate.hold_at(5)
        handle = await client.submit("two plus two is", PARAMS, model="a")
        while (await client.status(handle.request_id, "a")).num_output_tokens < 5:
            await asyncio.sleep(0.02)
        loading = asyncio.create_task(asyncio.to_thread(run_worker, "models", "--load", "b", "--namespace", namespace))
        history = await open_history(commands, Keys(namespace), "a")
        while len(events := await history.history(handle.request_id)) < 3:
            await asyncio.sleep(0.02)
        assert [(event.kind, event.cause) for event in events[1:3]] == [
            (EventKind.CLAIMED, ""),
            (EventKind.HANDED_BACK, "swapped for b"),
        ]
        gate.open()
        assert (await loading).returncode == 0
        assert (await handle.result()).outputs[0].text == expected[0]

        # It stays without requests, until that of the other model has waited for the longest time.
        back = await worker.await_event("swapped", left=["b"], entered="a")
        assert back["reason"] == "max_wait"
        while (await client.queue_stats("b")).readiness.state not in (ModelState.ASLEEP, ModelState.UNLOADED):
            await asyncio.sleep(0.02)
        late = await client.submit("two plus two is", PARAMS, model="b")
        assert (await late.result()).outputs[0].text == expected[0]
        first = (await (await open_history(commands, Keys(namespace), "b")).history(late.request_id))[0]
        assert (first.kind, first.cause) == (EventKind.QUEUED, WAITING_FOR_WAKE)
