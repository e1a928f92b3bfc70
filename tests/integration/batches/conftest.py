from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.producer import Client
from penstock.producer.batches import Batch, BatchStore
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage

ENDPOINT = "/v1/completions"
LEASE_TTL_S = 0.3


class Engine:
    """An engine played through the broker: it answers each request with its id, when it is told to."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.num_answered = 0

    async def claim(self, limit: int = 100) -> list[Claim]:
        return (await self.broker.claim("e0", EngineCapacity(max_num_seqs=limit))).claims

    async def answer(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            delta = Delta(text=f"answer to {claim.request_id}", finish_reason=FinishReason.STOP, usage=Usage(5, 2))
            assert await self.broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []
            self.num_answered += 1


@pytest.fixture
async def engine(commands: CommandConnection, namespace: str) -> Engine:
    card = ModelCard(model="m", max_model_len=100, vocab_size=50)
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    return Engine(Broker(commands, Keys(namespace).model("m")))


@pytest.fixture
async def client(redis_url: str, namespace: str, engine: Engine) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace) as client:
        yield client


@pytest.fixture
async def store(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[BatchStore]:
    async with BatchStore(redis_url, tmp_path / "files", namespace=namespace, lease_ttl_s=LEASE_TTL_S) as store:
        yield store


def row(number: int, **body: Any) -> bytes:
    fields = {"model": "m", "prompt": "hi"} | body
    return msgspec.json.encode({"custom_id": f"row-{number}", "method": "POST", "url": ENDPOINT, "body": fields})


async def parts(*lines: bytes) -> AsyncIterator[bytes]:
    for line in lines:
        yield line + b"\n"


async def make_batch(store: BatchStore, *lines: bytes, **options: Any) -> Batch:
    file = await store.files.create(parts(*lines), filename="in.jsonl")
    return await store.create(input_file_id=file.id, endpoint=ENDPOINT, **options)


async def lines_of(store: BatchStore, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their custom_id, each of which it has once."""
    if file_id is None:
        return {}
    content = b"".join([chunk async for chunk in store.files.content(file_id)])
    lines = [msgspec.json.decode(line) for line in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
