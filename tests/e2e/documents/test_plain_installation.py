"""Without the libraries that only make it faster, hiredis and uvloop, a worker serves the same answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams

PROMPTS = ["3 + 4 =", "12 + 30 ="]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


async def answers(stack: LocalStack) -> list[list[int]]:
    async with Client.connect(stack.url) as client:
        return [(await client.generate(prompt, PARAMS)).outputs[0].token_ids for prompt in PROMPTS]


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """A deployment whose processes find neither library."""
    for name in ("hiredis", "uvloop"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalStack(MODEL, ["--device", "cpu", "--threads", "1"]) as stack:
        yield stack


async def test_a_worker_without_hiredis_and_uvloop(deployment: LocalStack, plain: LocalStack) -> None:
    assert await answers(plain) == await answers(deployment)
