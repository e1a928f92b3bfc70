from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.producer import Client
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys

from ...redis_server import RedisServer
from .harness import reap_for_ever


@pytest.fixture
async def broker(commands: CommandConnection, namespace: str) -> Broker:
    """The worker's side, played by the test itself; the model is registered as a worker would."""
    card = ModelCard(model="m", max_model_len=100, vocab_size=50, registered_at=1.0)
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture
def deployment(redis_url: str, namespace: str, broker: Broker, tmp_path: Path) -> dict[str, str]:
    """Settings of a gateway of the model."""
    return {"redis_url": redis_url, "namespace": namespace, "files_dir": str(tmp_path / "files")}


@pytest.fixture
async def client(redis_url: str, namespace: str, broker: Broker) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace) as client:
        yield client


@pytest.fixture
async def reaper(broker: Broker) -> AsyncIterator[None]:
    reaping = asyncio.create_task(reap_for_ever(broker))
    yield
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)


@pytest.fixture
async def engine(server: RedisServer) -> AsyncIterator[Broker]:
    """The broker of an engine that waits for Redis for ever."""
    connection = CommandConnection(server.url, retry_for_s=float("inf"))
    card = ModelCard(model="m", max_model_len=1000, vocab_size=50)
    await connection.execute("HSET", Keys().models(), "m", msgspec.json.encode(card))
    yield Broker(connection, Keys().model("m"))
    await connection.close()
