"""`penstock jobs` runs what was made, goes on with what a killed one began, and has the end told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.producer.background.agenda import Agenda
from penstock.producer.batches import BatchStore
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.events import EventState, WebhookEvent
from penstock.producer.webhooks.secrets import SecretStore
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys

from ..jobs.processes import JobsProcess, jobs_command, until
from .conftest import Engine, lines_of, make_batch, row

URL = "https://hooks.example.org/end"


@pytest.fixture
def start(redis_url: str, namespace: str, tmp_path: Path) -> Iterator[Callable[[], JobsProcess]]:
    started: list[JobsProcess] = []

    def start() -> JobsProcess:
        command = [*jobs_command(redis_url, namespace), "--files-dir", str(tmp_path / "files")]
        started.append(JobsProcess(command, tmp_path / "jobs.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
async def test_jobs_run_batches_and_a_killed_one_is_followed(
    store: BatchStore,
    engine: Engine,
    start: Callable[[], JobsProcess],
    commands: CommandConnection,
    namespace: str,
) -> None:
    keys = Keys(namespace)
    with pytest.raises(ValidationError, match="webhook_url"):
        await make_batch(store, row(0), webhook_url=URL)
    await SecretStore(commands, keys).create("default")
    batch = await make_batch(store, *(row(number) for number in range(40)), webhook_url=URL)

    async def answered(num_rows: int) -> bool:
        await engine.answer(await engine.claim(3))
        return engine.num_answered >= num_rows

    killed = await asyncio.to_thread(start)
    await until(lambda: answered(10), "the first process runs nothing")
    # The requests of all rows are in the queue by now; some of their answers, nobody has read yet.
    await asyncio.to_thread(killed.kill)
    await asyncio.to_thread(start)

    async def ended() -> bool:
        await engine.answer(await engine.claim(3))
        return (await store.get(batch.id)).status == "completed"

    await until(ended, "the second process does not end the batch")
    done = await store.get(batch.id)
    assert set(await lines_of(store, done.output_file_id)) == {f"row-{number}" for number in range(40)}
    assert engine.num_answered == 40

    events = EventStore(commands, keys, Agenda(commands, keys))

    async def told() -> list[WebhookEvent]:
        return [event for state in EventState for event in await events.list(state)]

    await until(told, "the end is not told")
    found = await told()
    assert [(event.type, event.url) for event in found] == [("batch.completed", URL)]
    assert msgspec.json.decode(found[0].body)["data"] == {"id": batch.id}
    record = await store.record(batch.id)
    await store.report_end(record)
    assert len(await told()) == 1
