"""The life of a batch, with an engine that the test plays."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from penstock.producer import Client
from penstock.producer.batches import Batch, BatchStatus, BatchStore, run_batch
from penstock.producer.batches.batch_records import COMPLETION_WINDOWS_S
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import (
    BatchEndedError,
    BatchHeldError,
    BatchTakenOverError,
    UnknownBatchError,
    UnknownFileError,
    ValidationError,
)
from penstock.shared.keys import Keys
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.queue.policy import QueuePolicy

from ...processes import DEADLINE_S
from .conftest import ENDPOINT, Engine, lines_of, make_batch, parts, row


async def reached(store: BatchStore, batch: Batch, status: BatchStatus) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while (found := await store.get(batch.id)).status is not status:
            await asyncio.sleep(0.01)
    return found


async def claimed(engine: Engine, num_requests: int, running: asyncio.Task[Batch]) -> list[Any]:
    """Claim until the engine has so many requests of a run that is under way."""
    claims: list[Any] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(claims) < num_requests:
            assert not running.done(), running.result()
            claims += await engine.claim()
            await asyncio.sleep(0.01)
    return claims


async def test_rows_are_run_within_the_window_and_failures_stand_apart(
    store: BatchStore, client: Client, engine: Engine
) -> None:
    lines = [row(0), row(1, temperature=-1), row(2, n=2), row(3, prompt=["a", "b"]), row(4)]
    batch = await make_batch(store, *lines, metadata={"project": "x"}, output_expires_after_s=3600)
    assert (batch.status, batch.metadata) == ("validating", {"project": "x"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    running = asyncio.create_task(run_batch(client, store, batch.id, window=2))
    claims = await claimed(engine, 3, running)
    for _ in range(20):  # each a turn of the loop and of Redis, in which the runner could send more
        assert (await client.queue_stats()).depth == 0, "more rows are under way than the window allows"
    assert len(claims) == 3
    await reached(store, batch, BatchStatus.IN_PROGRESS)
    await engine.answer(claims)
    await engine.answer(await claimed(engine, 3, running))
    ended = await running
    assert ended == await store.get(batch.id)
    counts = ended.request_counts
    assert (ended.status, ended.model) == ("completed", "m")
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.output_tokens, ended.usage.total_tokens) == (25, 12, 37)
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    output, errors = await lines_of(store, ended.output_file_id), await lines_of(store, ended.error_file_id)
    assert set(output) == {"row-0", "row-2", "row-3", "row-4"}
    assert [len(output[f"row-{number}"]["response"]["body"]["choices"]) for number in (0, 2, 3)] == [1, 2, 2]
    assert set(errors) == {"row-1"}
    assert errors["row-1"]["response"]["status_code"] == 400
    assert errors["row-1"]["response"]["body"]["error"]["param"] == "temperature"
    file = await store.files.get(ended.output_file_id or "")
    assert (file.purpose, file.expires_at) == ("batch_output", file.created_at + 3600)
    with pytest.raises(BatchEndedError):
        await run_batch(client, store, batch.id)
    with pytest.raises(BatchEndedError):
        await store.cancel(batch.id)


async def test_requests_of_a_batch_belong_to_the_trace_of_its_creation(
    store: BatchStore, client: Client, engine: Engine
) -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    batch = await make_batch(store, row(0), trace_headers=headers)
    running = asyncio.create_task(run_batch(client, store, batch.id))
    claims = await claimed(engine, 1, running)
    assert msgspec.msgpack.decode(claims[0].payload, type=EngineCoreRequest).trace_headers == headers
    await engine.answer(claims)
    assert (await running).status == "completed"
    with pytest.raises(ValidationError, match="trace_headers must map strings to strings"):
        await make_batch(store, row(0), trace_headers={"traceparent": 1})


async def test_a_runner_with_a_lost_lease_stops_writing(
    store: BatchStore, client: Client, engine: Engine, commands: CommandConnection, namespace: str
) -> None:
    batch = await make_batch(store, row(0), row(1))
    stale = await store.claim(batch.id)
    open_batches = Keys(namespace).batches().open
    await commands.execute("ZADD", open_batches, "XX", "GT", 1e15, batch.id)  # however slowly this runs
    with pytest.raises(BatchHeldError, match="held by another"):
        await run_batch(client, store, batch.id)
    assert list(await store.free_batches()) == []
    await stale.write(BatchStatus.IN_PROGRESS)
    await commands.execute("ZADD", open_batches, "XX", 1, batch.id)
    assert list(await store.free_batches()) == [batch.id]
    running = asyncio.create_task(run_batch(client, store, batch.id))
    await engine.answer(await claimed(engine, 2, running))
    ended = await running
    for status in (None, BatchStatus.FINALIZING, BatchStatus.COMPLETED):
        with pytest.raises(BatchTakenOverError):
            await stale.write(status, {"output_file_id": "file-stale"})
    assert not await stale.close()
    assert await store.get(batch.id) == ended


async def test_a_late_renewal_does_not_change_final_counts(store: BatchStore) -> None:
    """The renewal was created before the end and arrives after it."""
    batch = await make_batch(store, row(0), row(1))
    async with await store.claim(batch.id) as lease:
        await lease.write(BatchStatus.IN_PROGRESS, {"total": 2})
        await lease.write(BatchStatus.FINALIZING, {"completed": 1, "failed": 0})
        await lease.write(BatchStatus.EXPIRED, {"completed": 1, "failed": 1})
        assert await lease.write(None, {"completed": 1, "failed": 0}) is BatchStatus.EXPIRED
    counts = (await store.get(batch.id)).request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)


async def test_the_next_runner_attaches_and_asks_for_no_row_twice(
    store: BatchStore, client: Client, engine: Engine
) -> None:
    """The first runner leaves one row done, one in flight and one not submitted; the input file is deleted then."""
    batch = await make_batch(store, row(0), row(1), row(2))
    assert (await run_batch(client, store, batch.id, slice_s=0)).status == "in_progress"
    first = asyncio.create_task(run_batch(client, store, batch.id, window=1))
    await engine.answer(await claimed(engine, 1, first))
    (under_way,) = await claimed(engine, 1, first)
    first.cancel()
    await asyncio.wait([first])
    await store.files.delete(batch.input_file_id)
    assert list(await store.free_batches()) == [batch.id]
    running = asyncio.create_task(run_batch(client, store, batch.id))
    await engine.answer([*(await claimed(engine, 1, running)), under_way])
    ended = await running
    assert list(await store.free_batches()) == []
    output = await lines_of(store, ended.output_file_id)
    assert set(output) == {"row-0", "row-1", "row-2"}
    assert engine.num_answered == 3


async def test_a_row_already_submitted_by_another_version_is_reused(
    store: BatchStore, client: Client, engine: Engine
) -> None:
    batch = await make_batch(store, row(0))
    request_id = f"batch-{batch.id.removeprefix('batch_')}-0"
    await client.submit("<s>hi", request_id=request_id)
    await engine.answer(await engine.claim())
    done = await run_batch(client, store, batch.id)
    line = (await lines_of(store, done.output_file_id))["row-0"]
    assert line["response"]["body"]["choices"][0]["text"] == f"answer to {request_id}"
    assert engine.num_answered == 1


async def test_a_cancelled_batch_keeps_finished_rows(store: BatchStore, client: Client, engine: Engine) -> None:
    batch = await make_batch(store, *(row(number) for number in range(4)))
    running = asyncio.create_task(run_batch(client, store, batch.id, window=2))
    await engine.answer((await claimed(engine, 2, running))[:1])
    left = await claimed(engine, 1, running)
    assert (await store.cancel(batch.id)).status == "cancelling"
    assert (await store.cancel(batch.id)).status == "cancelling"
    ended = await running
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("cancelled", 1, 3)
    assert len(await lines_of(store, ended.output_file_id)) == 1
    errors = await lines_of(store, ended.error_file_id)
    assert [line["error"]["code"] for line in errors.values()] == ["batch_cancelled"] * 3
    assert [await engine.broker.state(claim.request_id) for claim in left] == ["cancelled"]
    assert (await client.queue_stats()).depth == 0


async def test_an_expired_batch_returns_finished_rows(
    store: BatchStore, client: Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for window_s in (2, 10, 60):  # as long as this machine needs to answer one of the two
        monkeypatch.setitem(COMPLETION_WINDOWS_S, "24h", window_s)
        batch = await make_batch(store, row(0), row(1))
        running = asyncio.create_task(run_batch(client, store, batch.id))
        claims: list[Any] = []
        while len(claims) < 2 and not running.done():
            claims += await engine.claim()
            await asyncio.sleep(0.01)
        with suppress(AssertionError):  # it was too late for that
            await engine.answer(claims[:1])
        ended = await running
        if ended.request_counts.completed:
            break
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("expired", 1, 1)
    assert ended.expired_at is not None
    (line,) = (await lines_of(store, ended.error_file_id)).values()
    assert (line["response"], line["error"]["code"]) == (None, "batch_expired")


async def test_a_full_queue_is_waited_for(store: BatchStore, client: Client, engine: Engine) -> None:
    await client.configure_queue(QueuePolicy(bands=("first", "last"), default_band="first", max_queue_depth=1))
    batch = await make_batch(store, *(row(number) for number in range(3)))
    running = asyncio.create_task(run_batch(client, store, batch.id))
    async with asyncio.timeout(DEADLINE_S):
        while not running.done():
            await engine.answer(await engine.claim())
            await asyncio.sleep(0.01)
    assert (await running).request_counts.completed == 3


async def test_a_wrong_file_fails_the_batch_with_its_lines(store: BatchStore, client: Client) -> None:
    batch = await make_batch(store, row(0), b"{", row(0))
    ended = await run_batch(client, store, batch.id)
    assert ended.errors is not None
    assert [(problem.line, problem.code) for problem in ended.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    unknown = await run_batch(client, store, (await make_batch(store, row(0, model="none"))).id)
    assert unknown.errors is not None
    assert [problem.code for problem in unknown.errors.data] == ["model_not_found"]
    lost = await make_batch(store, row(0))
    await store.files.contents.clear(lost.input_file_id)
    with pytest.raises(UnknownFileError, match="a file system that hosts share"):
        await run_batch(client, store, lost.id)
    await store.files.delete(lost.input_file_id)
    gone = await run_batch(client, store, lost.id)
    assert gone.errors is not None
    assert [problem.code for problem in gone.errors.data] == ["input_file_not_found"]
    assert {batch.status for batch in (ended, unknown, gone)} == {"failed"}
    assert [batch.id for batch in (await store.list(limit=2)).data] == [lost.id, unknown.id]
    assert [batch.id for batch in (await store.list(after=unknown.id)).data] == [batch.id]


async def test_a_batch_is_validated_at_creation(store: BatchStore, client: Client) -> None:
    file = await store.files.create(parts(row(0)), filename="a")
    for field, wrong in {
        "endpoint": {"endpoint": "/v1/moderations"},
        "completion_window": {"completion_window": "1h"},
        "metadata": {"metadata": {"a": "x" * 513}},
        "output_expires_after.seconds": {"output_expires_after_s": 1},
        "batch_id": {"batch_id": "../x"},
    }.items():
        with pytest.raises(ValidationError, match=f"^{field}"):
            await store.create(**({"input_file_id": file.id, "endpoint": ENDPOINT} | wrong))
    with pytest.raises(UnknownFileError):
        await store.create(input_file_id=file.id, endpoint=ENDPOINT, tenant="acme")
    batch = await store.create(input_file_id=file.id, endpoint=ENDPOINT, batch_id="batch_1", is_private=True)
    assert await store.create(input_file_id=file.id, endpoint=ENDPOINT, batch_id="batch_1") == batch
    assert list(await store.free_batches()) == []
    with pytest.raises(UnknownBatchError):
        await store.get(batch.id, tenant="acme")
    with pytest.raises(ValidationError, match="window must"):
        await run_batch(client, store, batch.id, window=0)


async def test_each_line_of_the_output_is_one_line_for_every_reader(
    store: BatchStore, client: Client, engine: Engine
) -> None:
    custom_id = "a\x85b\u2028c\u2029d"
    line = msgspec.json.encode(msgspec.json.decode(row(0)) | {"custom_id": custom_id})
    batch = await make_batch(store, line)
    running = asyncio.create_task(run_batch(client, store, batch.id))
    await engine.answer(await claimed(engine, 1, running))
    output_file_id = (await running).output_file_id or ""
    content = b"".join([chunk async for chunk in store.files.content(output_file_id)]).decode()
    assert [msgspec.json.decode(one)["custom_id"] for one in content.splitlines()] == [custom_id]
