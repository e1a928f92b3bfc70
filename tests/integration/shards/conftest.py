"""A deployment of three servers: home, and the shards "a" and "b"."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from penstock.producer import Client
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.shards import ShardedCommands, make_commands

from ...redis_server import RedisServer

NAMES = ("home", "a", "b")
Connect = Callable[..., ShardedCommands]


class Deployment:
    """Its servers by name; ``shards`` and ``url`` are what processes are told."""

    def __init__(self, folder: Path) -> None:
        self.servers: dict[str, RedisServer] = {}
        for name in NAMES:
            (folder / name).mkdir()
            self.servers[name] = RedisServer(folder / name)
        self.url = self.servers["home"].url
        self.shards = {name: self.servers[name].url for name in NAMES[1:]}

    def start(self) -> None:
        for server in self.servers.values():
            server.start()
        for server in self.servers.values():
            server.wait_until_ready()

    def kill(self) -> None:
        for server in self.servers.values():
            server.kill()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path)
    deployment.start()
    yield deployment
    deployment.kill()


@pytest.fixture
async def connect(deployment: Deployment) -> AsyncIterator[Connect]:
    """Makes connections of further processes; the arguments are those of ``make_commands``."""
    async with AsyncExitStack() as stack:

        def connect(shards: dict[str, str] | None = None, **options: float) -> ShardedCommands:
            made = make_commands(deployment.url, deployment.shards if shards is None else shards, Keys(), **options)
            stack.push_async_callback(made.close)
            assert isinstance(made, ShardedCommands)
            return made

        yield connect


@pytest.fixture
async def plain(deployment: Deployment) -> AsyncIterator[dict[str, CommandConnection]]:
    """A plain connection to each server, by name."""
    connections = {name: CommandConnection(server.url) for name, server in deployment.servers.items()}
    yield connections
    for connection in connections.values():
        await connection.close()


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[Client]:
    async with Client.connect(deployment.url, shards=deployment.shards) as client:
        yield client


async def place(home: CommandConnection, model: str, shard: str, keys: Keys | None = None) -> None:
    """Record where a model is to be, before it is used."""
    keys = keys or Keys()
    await home.execute("HSET", keys.placements(), model, shard)
    if shard != "home":
        await home.execute("SET", keys.model(model).place, shard)


async def serve(commands: CommandConnection, model: str) -> Broker:
    """The worker's side, played by the test itself; the model is registered as a worker would."""
    card = ModelCard(model=model, max_model_len=1000, vocab_size=50)
    await commands.execute("HSET", Keys().models(), model, msgspec.json.encode(card))
    return Broker(commands, Keys().model(model))


async def keys_at(connection: CommandConnection, model: str) -> set[str]:
    """The keys of a model that a server has, but what the server itself has to remember."""
    keys = Keys().model(model)
    return {key.decode() for key in await connection.execute("KEYS", keys.pattern)} - {keys.place, keys.moved_by}
