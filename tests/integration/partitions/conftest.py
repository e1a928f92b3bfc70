"""A model with several partitions: all on one Redis, or on the shards of a deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from penstock.producer import Client
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.partitions import change, change_partitions, finder, layout
from penstock.shared.shards import make_commands

from ..shards.conftest import Deployment

MODEL = "m"
Connect = Callable[[], Awaitable[Client]]


@pytest.fixture(params=["one", "shards"])
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """The URL of home, and the shards."""
    if request.param == "one":
        return request.getfixturevalue("redis_url"), {}
    deployment = request.getfixturevalue("deployment")
    return deployment.url, deployment.shards


@pytest.fixture
def deployment(tmp_path) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path)
    deployment.start()
    yield deployment
    deployment.kill()


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes by a layout that is older than a moment, so that no change has to wait for it."""
    monkeypatch.setattr(layout, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(change, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(finder, "LOOK_AGAIN_S", 0.01)


@pytest.fixture
async def commands(place: tuple[str, dict[str, str]], namespace: str) -> AsyncIterator[CommandConnection]:
    url, shards = place
    connection = make_commands(url, shards, Keys(namespace))
    yield connection
    await connection.close()


@pytest.fixture
async def connect(
    place: tuple[str, dict[str, str]], namespace: str, commands: CommandConnection
) -> AsyncIterator[Connect]:
    """Makes clients, each as of a process of its own."""
    card = ModelCard(model=MODEL, max_model_len=1000, vocab_size=50)
    await commands.execute("HSET", Keys(namespace).models(), MODEL, msgspec.json.encode(card))
    url, shards = place
    async with AsyncExitStack() as stack:

        async def connect() -> Client:
            return await stack.enter_async_context(Client.connect(url, namespace=namespace, shards=shards))

        yield connect


@pytest.fixture
async def client(connect: Connect) -> Client:
    return await connect()


class Parts:
    """The partitions as an engine has them, which the test plays."""

    def __init__(self, commands: CommandConnection, keys: Keys) -> None:
        self.commands = commands
        self.keys = keys
        self.layout = layout.Layout()

    async def grow(self, num: int, spread: list[str] | None = None) -> None:
        self.layout = await change_partitions(self.commands, self.keys, MODEL, num, spread)

    def __getitem__(self, number: int) -> Broker:
        return Broker(self.commands, self.keys.model(MODEL, number), number)


@pytest.fixture
def parts(commands: CommandConnection, namespace: str, connect: Connect) -> Parts:
    return Parts(commands, Keys(namespace))


def tenant_of(partition: int, num: int, *, before: tuple[int, int] | None = None, other_than: str = "") -> str:
    """Return a tenant that has this partition of ``num``; ``before`` is what it had of how many."""
    return next(
        name
        for name in (f"tenant{number}" for number in range(10_000))
        if layout.choose_partition(name, num) == partition
        and name != other_than
        and (before is None or layout.choose_partition(name, before[1]) == before[0])
    )
