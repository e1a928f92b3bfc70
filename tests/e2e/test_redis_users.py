"""Users of Redis with the rights that the guide gives them, and no others, can do all that their part does."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.ops.local_worker import LocalWorker
from penstock.producer import Client, SamplingParams
from penstock.producer.jobs import JobSet, JobSettings
from penstock.shared.embedded import EmbeddedRedis

GUIDE = Path(__file__).parents[2] / "ops" / "guide" / "redis.md"
OPTIONS = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--max-num-seqs", "16"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def rights() -> dict[str, list[str]]:
    """The words of each user, as the guide has them."""
    lines = re.findall(r"^user (\w+) (on .*)$", GUIDE.read_text(), re.MULTILINE)
    return {name: words.split() for name, words in lines}


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[dict[str, str]]:
    """URLs of a Redis on which nobody but these users may do anything."""
    server = EmbeddedRedis.start(tmp_path)
    with redis.Redis.from_url(server.url) as admin:
        info: dict[str, Any] = admin.info("server")  # type: ignore[assignment]  # redis-py says it may be awaited
        is_old = info["redis_version"].startswith("6.")
        for name, words in rights().items():
            allowed = [word for word in words if not (is_old and word == "+config|get")]
            admin.execute_command("ACL", "SETUSER", name, *allowed)
    yield {name: server.url.replace("unix://", f"unix://{name}:{name}-password@") for name in rights()}
    server.close()


@pytest.fixture
def worker(urls: dict[str, str], tmp_path: Path, demo_model: Path) -> Iterator[LocalWorker]:
    worker = LocalWorker(str(demo_model), urls["worker"], OPTIONS, tmp_path / "worker.log")
    worker.spawn()
    try:
        worker.await_ready()
        yield worker
    finally:
        worker.stop()


async def test_each_can_do_its_part(urls: dict[str, str], worker: LocalWorker, tmp_path: Path) -> None:
    async with Client.connect(urls["client"]) as client:
        streamed = [delta async for delta in client.stream("count from one to three:", PARAMS)]
        handle = await client.submit("count from one to three:", PARAMS)
        assert (await handle.result()).text == "".join(delta.text for delta in streamed)
        left = await client.submit("count from one to three:", PARAMS)
        await left.cancel()
        assert await client.models()
        async with client.converse(PARAMS) as conversation:
            await conversation.send("count from one to three:")
            assert [delta async for delta in conversation.segment()]
            await conversation.close_input()
    settings = JobSettings(redis_url=urls["jobs"])
    pool = JobSet(settings).pool()
    job = await pool.enqueue_job("generate", "count from one to three:", {"temperature": 0.0, "max_tokens": 8})
    assert job is not None
    done = await asyncio.to_thread(run_command, "jobs", "--burst", "--redis-url", urls["jobs"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert (await job.result(timeout=30))["outputs"]
    await pool.aclose(close_connection_pool=True)
    listed = await asyncio.to_thread(run_command, "queue", "show", "demo", "--redis-url", urls["client"])
    assert listed.returncode == 0, listed.stderr[-3000:]
    assert "NOPERM" not in (tmp_path / "worker.log").read_text()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
