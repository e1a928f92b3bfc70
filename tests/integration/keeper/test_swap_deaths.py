"""Processes killed in a swap: the swap goes on, requests resume after their last token, and no other model suffers."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock.producer import Client, SamplingParams

from ...gate import Gate
from .conftest import ShareDevice, SharedWorker, texts_of

pytestmark = pytest.mark.slow
PROMPT = "count from four to nine:"
# A working model is left at once, as often as somebody waits.
IMPATIENT = ("--patience", "standard=0.01", "--max-swap-share", "0.5")
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)


async def _stop_core(worker: SharedWorker, name: str) -> dict[str, int]:
    """Stop the core of a model, which then carries out nothing until it is killed, and return its processes."""
    beat = await worker.beat(name, lambda beat: beat.core_pid > 0)
    os.kill(beat.core_pid, signal.SIGSTOP)
    return {"core": beat.core_pid, "worker": beat.worker_pid}


@pytest.mark.parametrize("role", ["core", "worker"])
async def test_a_process_killed_in_a_swap(
    share_device: ShareDevice, redis_url: str, namespace: str, gate: Gate, role: str
) -> None:
    async with asyncio.timeout(240), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *IMPATIENT, "--stall-timeout", "300")
        short = await texts_of(client, [PROMPT], ["b"])
        whole = (await client.generate(PROMPT, LONG, model="a")).outputs[0].text

        # The model that leaves, which has half of an answer: going to sleep.
        gate.hold_at(30)
        running = asyncio.create_task(client.generate(PROMPT, LONG, model="a"))
        await worker.beat("a", lambda beat: beat.num_running_reqs == 1)
        leaving = await _stop_core(worker, "a")
        waiting = asyncio.create_task(texts_of(client, [PROMPT], ["b"]))
        await worker.until("a", lambda model: model.phase == "to sleep")
        os.kill(leaving[role], signal.SIGKILL)
        gate.open()
        assert await waiting == short
        assert (await running).outputs[0].text == whole

        # The model that enters: waking up.
        await worker.until("a", lambda model: model.phase == "awake")
        entering = await _stop_core(worker, "b")
        waiting = asyncio.create_task(texts_of(client, [PROMPT], ["b"]))
        await worker.until("b", lambda model: model.phase == "waking")
        os.kill(entering[role], signal.SIGKILL)
        assert await waiting == short
        failed = await worker.await_event("wake_failed", model="b")
        assert failed["num_failures"] == 1
        await worker.until("b", lambda model: not model.error)
        assert (await client.generate(PROMPT, LONG, model="a")).outputs[0].text == whole


async def test_a_supervisor_killed_in_a_swap_and_another_one(
    share_device: ShareDevice, redis_url: str, namespace: str, gate: Gate
) -> None:
    async with asyncio.timeout(240), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *IMPATIENT, "--stall-timeout", "300")
        whole = (await client.generate(PROMPT, LONG, model="a")).outputs[0].text
        gate.hold_at(30)
        running = asyncio.create_task(client.generate(PROMPT, LONG, model="a"))
        await worker.beat("a", lambda beat: beat.num_running_reqs == 1)
        stopped = await _stop_core(worker, "a")
        waiting = asyncio.create_task(client.generate(PROMPT, LONG, model="b"))
        await worker.until("a", lambda model: model.phase == "to sleep")
        worker.started.note_processes()
        worker.started.process.kill()
        os.kill(stopped["core"], signal.SIGKILL)
        gate.open()
        other = await share_device("a", "b", *IMPATIENT)
        # The device of the CPU is not exclusive, so a worker that is still ending would only be a warning.
        outputs = await asyncio.gather(running, waiting)
        assert [output.outputs[0].text for output in outputs] == [whole, whole]
        assert {model.name for model in (await other.device()).models} == {"a", "b"}
        await asyncio.to_thread(worker.started.await_end)
        third = await share_device("a", "b")
        # Another test may hold the lock of this machine's CPU, too.
        await third.await_event("device_shared_by_workers")
