"""Two engines controlled from outside while they serve, with an operator's own methods."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, Client, EngineCallError, SleepState
from penstock.producer.client_parts.core import CALL_TIMEOUT_S
from penstock.shared import errors
from penstock.shared.messages.supervision import EngineState

from ..gate import Gate
from ..processes import DEADLINE_S
from .following import LONG, PROMPT, Following, beats, short, states

pytestmark = pytest.mark.xdist_group("two-engines")

RPC_MODULE = """
import threading
from penstock.worker.engine.rpc import rpc_method

NEVER = threading.Event()

@rpc_method("block_size")
def block_size(engine, factor):
    return engine.core.scheduler.block_pool.block_size * factor

@rpc_method("wait", takes_long=True)
def wait(engine, seconds):
    NEVER.wait(seconds)
"""


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory, shared_gate: Gate) -> Iterator[LocalStack]:
    """Two engines with an operator's own methods."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_rpc_methods.py").write_text(RPC_MODULE)
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--engines", "2"]
    with pytest.MonkeyPatch.context() as patch, shared_gate.for_engines():
        patch.setenv("PYTHONPATH", str(folder))
        with LocalStack(MODEL, [*options, "--rpc-module", "my_rpc_methods"]) as stack:
            yield stack


@pytest.fixture(scope="module")
def expected(two_engines: LocalStack) -> list[int]:
    """The undisturbed answer to ``LONG``."""
    with LLM(two_engines.url, model="demo") as llm:
        return list(llm.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids)


async def test_the_other_engine_resumes_requests_of_a_sleeping_one(
    two_engines: LocalStack, gate: Gate, expected: list[int]
) -> None:
    async with Client.connect(two_engines.url) as client:
        following = [Following(client, gate) for _ in range(3)]
        for one in following:
            await one.under_way()
        first, second = sorted(await client.is_sleeping())
        await client.sleep(engine_id=first)
        assert await client.is_sleeping() == {first: True, second: False}
        async with asyncio.timeout(DEADLINE_S):
            while (await client.queue_stats()).num_returned:
                await asyncio.sleep(0.01)
        await client.sleep(engine_id=second)
        await client.wake_up(engine_id=first)
        assert await client.is_sleeping() == {first: False, second: True}
        for one in following:
            await one.check(expected)
        assert await short(client) == expected[:20]
        assert await client.wake_up() == {first: SleepState(), second: SleepState()}


async def test_a_failure_of_one_engine_is_returned_with_the_others_answer(two_engines: LocalStack) -> None:
    async with Client.connect(two_engines.url) as client:
        first, second = sorted(await client.is_sleeping())
        await client.sleep(engine_id=first)
        with pytest.raises(EngineCallError, match=f"failed at 1 of 2 engines: {first}: .*wake them up first") as caught:
            await client.execute_dummy_batch()
        assert list(caught.value.answers) == [second]
        await client.wake_up()


async def test_methods_of_the_operator(two_engines: LocalStack) -> None:
    async with Client.connect(two_engines.url) as client:
        results = await client.collective_rpc("block_size", kwargs={"factor": 3})
        assert list(results.values()) == [48, 48]
        engine_id = min(results)
        with pytest.raises(EngineCallError) as caught:
            await client.collective_rpc("wait", [5.0], engine_id=engine_id, timeout_s=0.3)
        assert isinstance(caught.value.errors[engine_id], errors.EngineTimeoutError)
        assert await client.collective_rpc("block_size", [1], engine_id=engine_id) == {engine_id: 16}


async def test_an_engine_that_dies_asleep_sleeps_on_beside_another(two_engines: LocalStack) -> None:
    async with Client.connect(two_engines.url) as client:
        engine_id, other_id = sorted(await client.is_sleeping())
        await client.sleep(2)
        os.kill((await beats(two_engines.url))[engine_id].core_pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            words = {engine_id: "sleeping 2, unloaded", other_id: "sleeping 2"}
            while {key: beat.state_words for key, beat in (await beats(two_engines.url)).items()} != words:
                await asyncio.sleep(0.05)
        await client.wake_up()
        assert await client.is_sleeping() == {engine_id: False, other_id: False}
        assert len(await short(client)) == 20


async def test_a_worker_that_leaves_notifies_waiting_clients(two_engines: LocalStack) -> None:
    """Last: its engines are gone then."""
    async with Client.connect(two_engines.url) as client:
        engine_id = min(await client.is_sleeping())
        waiting = asyncio.create_task(client.collective_rpc("wait", [60.0], engine_id=engine_id))
        behind = asyncio.create_task(client.sleep(engine_id=engine_id))
        async with asyncio.timeout(CALL_TIMEOUT_S / 2):
            while (await states(two_engines.url))[engine_id] is not EngineState.COMPILING:
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(asyncio.to_thread(two_engines.stop_worker))
        async with asyncio.timeout(CALL_TIMEOUT_S / 2):
            for call in (waiting, behind):
                with pytest.raises(EngineCallError) as caught:
                    await call
                assert isinstance(caught.value.errors[engine_id], errors.EngineDeadError)
        await stopping
        with pytest.raises(errors.EngineDeadError, match="no engine of model 'demo' can be called"):
            await client.sleep()
