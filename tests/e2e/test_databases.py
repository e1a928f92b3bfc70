"""Two deployments in two databases of one Redis, with the same namespace, model and request ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.ops.local.worker import LocalWorker
from penstock.producer import Client, SamplingParams

from ..gate import Gate
from ..processes import DEADLINE_S
from .following import beats, short

PROMPT = "count from four to nine:"
NUM_TOKENS = 120
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
OTHER_PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS // 2, ignore_eos=True)


@pytest.fixture(scope="module")
def other_worker(deployment: LocalStack, shared_gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of database 1 of the deployment's Redis, where another worker serves."""
    url = f"{deployment.url}?db=1"
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1"]
    log_path = tmp_path_factory.mktemp("other") / "worker.log"
    with shared_gate.for_engines():
        worker = LocalWorker(str(MODEL), url, options, log_path)
        worker.spawn()
    try:
        worker.await_ready()
        yield url
    finally:
        worker.stop()


@pytest.fixture
async def clients(deployment: LocalStack, other_worker: str) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        urls = (deployment.url, other_worker)
        yield [await stack.enter_async_context(Client.connect(url)) for url in urls]


async def test_each_caller_gets_its_own_answer(clients: list[Client], gate: Gate) -> None:
    here, there = clients
    gate.hold_at(NUM_TOKENS // 3)
    requests = [(here, PROMPT, PARAMS), (there, PROMPT[::-1], OTHER_PARAMS)]
    expected = [client.generate(prompt, params) for client, prompt, params in requests]
    same_id = [client.generate(prompt, params, request_id="same") for client, prompt, params in requests]
    running = [asyncio.create_task(work) for work in (*expected, *same_id)]
    gate.open()
    outputs = [[*output.outputs[0].token_ids] for output in await asyncio.gather(*running)]
    assert outputs[2:] == outputs[:2]
    assert [len(output) for output in outputs] == [NUM_TOKENS, NUM_TOKENS // 2] * 2


async def test_a_cancellation_ends_only_the_request_of_its_database(clients: list[Client], gate: Gate) -> None:
    gate.hold_at(NUM_TOKENS // 3)
    handles = [await client.submit(PROMPT, PARAMS, request_id="cancelled") for client in clients]
    for handle in handles:
        async with asyncio.timeout(DEADLINE_S):
            async for delta in handle.stream():
                if delta.next_index >= 5:
                    break
    await handles[1].cancel()
    gate.open()
    results = [await handle.result() for handle in handles]
    assert [result.outputs[0].finish_reason for result in results] == ["length", "cancelled"]
    assert len(results[0].outputs[0].token_ids) == NUM_TOKENS


async def test_control_calls_reach_only_the_engine_of_their_database(clients: list[Client], other_worker: str) -> None:
    here, there = clients
    (engine_id,) = await beats(other_worker)
    await there.sleep()
    assert await there.is_sleeping() == {engine_id: True}
    assert set((await here.is_sleeping()).values()) == {False}
    assert len(await short(here)) == 20
    await there.wake_up()
    assert len(await short(there)) == 20
