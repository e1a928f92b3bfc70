"""Processes killed in a swap: the swap goes on, requests resume after their last token, and no other model suffers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil
import pytest

from penstock.producer import Client, SamplingParams

from ...gate import Gate
from ...processes import DEADLINE_S
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


@pytest.mark.parametrize(("role", "fault"), [("core", signal.SIGSEGV), ("worker", signal.SIGKILL)])
async def test_a_process_killed_in_a_swap(
    share_device: ShareDevice, redis_url: str, namespace: str, gate: Gate, role: str, fault: signal.Signals
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *IMPATIENT, "--stall-timeout", "300", sleep_level=2)
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
        os.kill(entering[role], fault)
        os.kill(entering[role], signal.SIGCONT)
        assert await waiting == short
        failed = await worker.await_event("wake_failed", model="b")
        assert failed["num_failures"] == 1
        # A crash is the model's own; nobody is to blame for a kill.
        assert failed["is_external"] is (fault is signal.SIGKILL)
        await worker.until("b", lambda model: not model.error)
        assert (await client.generate(PROMPT, LONG, model="a")).outputs[0].text == whole


async def test_a_supervisor_killed_in_a_swap_and_another_one(
    share_device: ShareDevice, redis_url: str, namespace: str, gate: Gate
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *IMPATIENT, "--stall-timeout", "300", sleep_level=2)
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


@contextmanager
def _denied_memory(core_pids: Sequence[int], num_bytes: int) -> Iterator[None]:
    """Limit the address space of cores, and of those that the same process starts, as a host without memory would."""
    cores = [psutil.Process(pid) for pid in core_pids]
    processes = {process.pid: process for core in cores for process in (core, core.parent()) if process is not None}
    former = {pid: process.rlimit(resource.RLIMIT_AS) for pid, process in processes.items()}
    for pid, process in processes.items():
        process.rlimit(resource.RLIMIT_AS, (num_bytes, former[pid][1]))
    try:
        yield
    finally:
        for pid, process in processes.items():
            with suppress(psutil.NoSuchProcess):
                process.rlimit(resource.RLIMIT_AS, former[pid])


async def test_a_model_that_memory_is_denied_is_served_with_half_of_its_cache(
    share_device: ShareDevice, redis_url: str, namespace: str
) -> None:
    cache_mib = 1024
    memory = ("--device-memory", f"{2 * cache_mib}MiB", "--kv-cache-memory", f"{cache_mib}MiB")
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *memory, "--dtype", "float32", "--max-num-seqs", "512", sleep_level=2)
        expected = await texts_of(client, [PROMPT], ["a"])
        await texts_of(client, [PROMPT], ["b"])
        await worker.until("a", lambda model: model.phase == "asleep")
        cores = [(await worker.beat(name, lambda beat: beat.core_pid > 0)).core_pid for name in "ab"]
        # The whole cache lacks a quarter of it.
        with _denied_memory(cores, psutil.Process(cores[1]).memory_info().vms - (cache_mib << 18)):
            assert await texts_of(client, [PROMPT], ["a"]) == expected
            beat = await worker.beat("a", lambda beat: beat.setup is not None and beat.core_pid not in (0, cores[0]))
        assert beat.setup is not None
        assert cache_mib << 18 < beat.setup.kv_cache_bytes <= cache_mib << 19
        # It did not wake, and neither did it load with all of its cache.
        lacked = [line["kv_cache_mib"] for line in worker.started.events if line["event"] == "wake_lacked_memory"]
        assert lacked == [cache_mib] * 3
        assert not [line for line in worker.started.events if line["event"] == "wake_failed"]
