"""A chaos run in which nothing moves any more has an end, and says what was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.ops.lab.chaos.load import run_load
from penstock.ops.lab.chaos.owners import Owners
from penstock.ops.lab.chaos.verdict import judge
from penstock.ops.lab.chaos.workload import make_requests
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.redis_access.embedded import EmbeddedRedis

from ...processes import DEADLINE_S


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedRedis.start(tmp_path)
    yield server.url
    server.close()


async def test_a_run_in_which_all_hang_has_an_end(url: str) -> None:
    """A model that is known, and no engine that serves it."""
    commands = CommandConnection(url)
    card = ModelCard(model="m", max_model_len=100, vocab_size=50)
    await commands.execute("HSET", Keys().models(), "m", msgspec.json.encode(card))
    await commands.close()
    requests = make_requests(4, 1)
    async with asyncio.timeout(DEADLINE_S):
        result = await run_load(
            url,
            requests,
            label="r",
            concurrency=2,
            on_delta=lambda *_: None,
            go_on=lambda number: True,
            patience_s=1.0,
        )
    verdict = judge(result.sightings, result.sightings, Owners(num_records=1), num_kills=1)
    assert verdict.lost == verdict.num_requests == 2
    assert not verdict.is_clean
