from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from arq.connections import ArqRedis

from penstock.producer import Client
from penstock.producer.jobs import JobSet, JobSettings
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys

from .processes import JobsProcess, jobs_command
from .receiver import Receiver

Start = Callable[..., JobsProcess]


@pytest.fixture
async def broker(commands: CommandConnection, namespace: str) -> Broker:
    """The worker's side, played by the test itself; the model is registered as a worker would."""
    card = ModelCard(model="m", max_model_len=100, vocab_size=50)
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture
async def client(redis_url: str, namespace: str, broker: Broker) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace, tenant="acme") as client:
        yield client


@pytest.fixture
def jobs(redis_url: str, namespace: str) -> JobSet:
    return JobSet(JobSettings(redis_url=redis_url, namespace=namespace))


@pytest.fixture
async def pool(jobs: JobSet) -> AsyncIterator[ArqRedis]:
    pool = jobs.pool()
    yield pool
    await pool.aclose(close_connection_pool=True)


@pytest.fixture
def start(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts `penstock jobs` processes of this namespace; what still runs at the end is killed."""
    started: list[JobsProcess] = []

    def start(*options: str) -> JobsProcess:
        started.append(JobsProcess([*jobs_command(redis_url, namespace), *options], tmp_path / "jobs.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def start_app(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[Start]:
    """Starts an app's own arq worker by arq's own command."""
    started: list[JobsProcess] = []
    command = [sys.executable, "-m", "arq", "app_worker.WorkerSettings"]

    def start() -> JobsProcess:
        folder = str(Path(__file__).parent)
        where = {"PYTHONPATH": folder, "APP_REDIS_URL": redis_url, "APP_NAMESPACE": namespace}
        started.append(JobsProcess(command, tmp_path / "app.log", **where))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
