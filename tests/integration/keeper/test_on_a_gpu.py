"""Models that share a GPU: one has its memory at a time, all of it comes back, and no other worker takes it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.producer import Client
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.devices import ModelPhase
from penstock.shared.redis_access.embedded import find_redis_server
from penstock.worker.processes.gpu import free_device_bytes

from ...processes import DEADLINE_S
from .conftest import ShareDevice, copy_of_model, texts_of


def has_redis() -> bool:
    """Return whether this machine has a server for the tests, which one with a GPU may lack."""
    with suppress(ConfigurationError):
        find_redis_server()
        return True
    return False


pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not has_redis(), reason="no redis-server here")]
PROMPT = "count from four to nine:"
# Two awake need 2460 MiB, and one awake with one asleep 2254: a process has 1 GiB, weights 6 MiB, a KV cache 200.
ON_GPU = ("--device=cuda", "--gpus=0", "--device-memory", "2300MiB", "--host-memory", "1GiB")
ON_GPU += ("--kv-cache-memory", "200MiB")
IMPATIENT = ("--patience", "standard=0.01", "--max-swap-share", "0.5")
MAX_GROWTH = 64 << 20


async def test_models_swap_in_the_memory_of_one(share_device: ShareDevice, redis_url: str, namespace: str) -> None:
    before = free_device_bytes("0")
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", *ON_GPU, *IMPATIENT)
        expected = await texts_of(client, [PROMPT], ["a"])
        used: list[int] = []
        for _ in range(10):
            for name in ("b", "a"):
                assert await texts_of(client, [PROMPT], [name]) == expected
                used.append(before - free_device_bytes("0"))
        assert max(used) <= 2300 << 20
        assert max(used[-4:]) - max(used[2:6]) <= MAX_GROWTH

        # The core of a sleeping model dies: it does not come back awake, and wakes when a request needs it.
        await worker.until("b", lambda model: model.phase == ModelPhase.ASLEEP)
        beat = await worker.beat("b", lambda beat: beat.core_pid > 0)
        os.kill(beat.core_pid, signal.SIGKILL)
        assert await texts_of(client, [PROMPT], ["a"]) == expected
        assert before - free_device_bytes("0") <= 2300 << 20
        assert await texts_of(client, [PROMPT], ["b"]) == expected


async def test_a_second_worker_of_several_models_is_refused(
    share_device: ShareDevice, redis_url: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        worker = await share_device("a", "b", *ON_GPU)
        models = [word for name in ("a", "b") for word in ("--model", str(copy_of_model(tmp_path, name)))]
        command = [sys.executable, "-m", "penstock.worker.cli", "start", *models, "--gpus", "0"]
        second = await asyncio.to_thread(
            subprocess.run, [*command, "--redis-url", redis_url], capture_output=True, text=True, check=False
        )
        assert second.returncode != 0
        assert f"pid {worker.started.process.pid}" in second.stderr
