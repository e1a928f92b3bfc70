"""The next engine reads the blocks that a killed engine had computed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.producer import Client

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import beating, busiest, finish, start_streams, until


@pytest.mark.parametrize(
    ("role", "ranks"),
    [
        ("core", ()),
        ("worker", ()),
        ("core", ("--tensor-parallel-size", "2")),
        ("core", ("--pipeline-parallel-size", "2")),
    ],
    ids=str,
)
async def test_offloaded_generations_are_loaded_and_resume(
    start: Start, gate: Gate, role: str, ranks: tuple[str, ...], tmp_path: Path
) -> None:
    """kill -9 in the middle: callers see the same tokens, and most of the earlier blocks are not computed again."""
    folder = tmp_path / "kept"
    stack = await start(1, "--deterministic", "--kv-offload-dir", str(folder), *ranks)
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        # Each has begun, so its prompt at least is on its way to the folder.
        await until(lambda: any(folder.glob("blocks/*/*/*.kv")), what="nothing is written")
        beat = await busiest(stack.url)
        os.kill(getattr(beat, f"{role}_pid"), signal.SIGKILL)
        await finish(watched, whole, gate)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                (beat,) = await beating(stack.url, 1)
                if beat.stats is not None and beat.stats.kv_offload and beat.stats.kv_offload.num_hit_tokens:
                    break
                await asyncio.sleep(0.05)
    assert beat.num_restarts == 1
    assert beat.stats.kv_offload.num_corrupt_blocks == 0
