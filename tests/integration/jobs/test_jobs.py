"""The jobs process with a real arq, killed in the middle; the engine is played through the broker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from arq.connections import ArqRedis
from arq.worker import Worker

from penstock.producer.jobs import JobSet
from penstock.producer.jobs.run import run_jobs
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ConfigurationError, ValidationError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import EngineCoreRequest

from ...otlp_receiver import OtlpReceiver
from ...processes import DEADLINE_S
from ...redis_server import RedisServer
from .conftest import Start
from .processes import JobsProcess, jobs_command, until


async def claim(broker: Broker) -> Claim:
    found: list[Claim] = []

    async def claimed() -> bool:
        found.extend((await broker.claim("e0", EngineCapacity(max_num_seqs=1), lease_ttl_ms=600_000)).claims)
        return bool(found)

    await until(claimed, "nothing was enqueued")
    return found[0]


@pytest.mark.slow
async def test_a_generation_outlives_the_process_that_submitted_it(
    start: Start,
    start_app: Start,
    broker: Broker,
    pool: ArqRedis,
    jobs: JobSet,
    commands: CommandConnection,
) -> None:
    first = start()
    job = await pool.enqueue_job("generate", [1, 2, 3], {"max_tokens": 2, "temperature": 0.0}, tenant="acme")
    assert job is not None
    running = await claim(broker)
    assert running.request_id == job.job_id
    await broker.append([Record(running.request_id, running.epoch, Delta(token_ids=[7], text="a"))])
    first.kill()
    second = start_app()

    async def taken_up() -> bool:
        return int(await commands.execute("GET", f"arq:retry:{job.job_id}") or 0) >= 2

    await until(taken_up, "the job of the dead process does not come back")
    last = Delta(index=1, token_ids=[8], text="b", finish_reason=FinishReason.LENGTH, usage=Usage(3, 2))
    assert await broker.finish([FinalRecord(running.request_id, running.epoch, last)]) == []
    output = await job.result(timeout=DEADLINE_S, poll_delay=0.05)
    assert (output["model"], output["outputs"][0]["text"]) == ("m", "ab")
    assert output["outputs"][0]["token_ids"] == [7, 8]
    assert output["usage"] == msgspec.structs.asdict(Usage(3, 2))
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims == []

    # The app's own job, by the same worker, after its own startup.
    shouted = await pool.enqueue_job("shout", "fine")
    assert shouted is not None
    assert await shouted.result(timeout=DEADLINE_S, poll_delay=0.05) == "FINE!"
    wrong = await pool.enqueue_job("generate", "hi", {"max_token": 2})
    assert wrong is not None
    with pytest.raises(ValidationError, match="params has no max_token"):
        await wrong.result(timeout=DEADLINE_S, poll_delay=0.05)
    assert await commands.execute("ZCARD", jobs.settings.keys.jobs_due()) == 0
    # Its status is arq's own: 1 when a signal comes while arq writes the end of a job.
    second.stop()


async def test_a_jobs_request_is_a_part_of_the_trace_that_the_job_names(
    start: Start, broker: Broker, pool: ArqRedis
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    with OtlpReceiver() as receiver:
        process = start("--otlp-traces-endpoint", receiver.url)
        job = await pool.enqueue_job("generate", "hi", trace_headers=headers)
        assert job is not None
        running = await claim(broker)
        request = msgspec.msgpack.decode(running.payload, type=EngineCoreRequest)
        last = Delta(text="a", finish_reason=FinishReason.STOP, usage=Usage(1, 1))
        assert await broker.finish([FinalRecord(running.request_id, running.epoch, last)]) == []
        assert (await job.result(timeout=DEADLINE_S, poll_delay=0.05))["outputs"][0]["text"] == "a"
        await asyncio.to_thread(process.stop)
        (span,) = receiver.trace(trace_id)
        assert (span.name, span.service, span.parent_id) == ("enqueue", "penstock-jobs", "b7ad6b7169203331")
        assert request.trace_headers is not None
        assert request.trace_headers["traceparent"].startswith(f"00-{trace_id}-{span.span_id}-")


async def test_a_signal_while_a_jobs_end_is_being_written_ends_the_process_in_order(
    pool: ArqRedis, jobs: JobSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()
    workers: list[Worker] = []
    finish = Worker.finish_job

    async def finish_when_told(worker: Worker, *arguments: Any) -> None:
        workers.append(worker)
        ending.set()
        await may_end.wait()
        await finish(worker, *arguments)

    monkeypatch.setattr(Worker, "finish_job", finish_when_told)
    wrong = await pool.enqueue_job("generate", "hi", {"max_token": 2})
    assert wrong is not None
    running = asyncio.create_task(run_jobs(jobs.settings))
    await asyncio.wait_for(ending.wait(), 60)
    workers[0].handle_sig(signal.SIGTERM)
    may_end.set()
    await asyncio.wait_for(running, 60)


async def test_a_worker_that_would_pickle_our_jobs_is_refused(jobs: JobSet, redis_url: str) -> None:
    async with ArqRedis.from_url(redis_url) as pickling:
        with pytest.raises(ConfigurationError, match="job_serializer"):
            await jobs.on_startup({"redis": pickling})


async def test_a_connection_that_is_lost_while_a_key_is_watched_is_waited_for(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    """redis-py raises WatchError then instead of a connection error."""
    relay = WatchCutter(redis_url)
    async with relay.serving() as url:
        process = JobsProcess(jobs_command(url, namespace), tmp_path / "jobs.log")
        try:

            async def has_watched_again() -> bool:
                assert process.process.poll() is None, (tmp_path / "jobs.log").read_text()
                return relay.num_cut == 1 and relay.num_watched >= 3

            await until(has_watched_again, "no job is looked at after the loss")
        finally:
            status = await asyncio.to_thread(process.stop)
    assert status == 0


async def test_a_process_that_is_terminated_while_redis_is_away_leaves(tmp_path: Path, namespace: str) -> None:
    server = await asyncio.to_thread(RedisServer, tmp_path / "redis")
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.wait_until_ready)
    log_path = tmp_path / "jobs.log"
    process = await asyncio.to_thread(JobsProcess, jobs_command(server.url, namespace), log_path)

    async def has_logged(event: str) -> bool:
        log = await asyncio.to_thread(log_path.read_text)
        assert process.process.poll() is None, log
        return event in log

    try:
        await until(partial(has_logged, "jobs_started"), "it does not start")
        await asyncio.to_thread(server.kill)
        await until(partial(has_logged, "redis_away"), "it does not notice that Redis is away")
        process.process.send_signal(signal.SIGTERM)
        # Far below the minute for which arq's connection tries to reach Redis again.
        assert await asyncio.to_thread(process.process.wait, 40) == 0
    finally:
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(server.kill)


class WatchCutter:
    """Hands connections to Redis; one is cut between its WATCH and the next command."""

    def __init__(self, redis_url: str) -> None:
        self._path = redis_url.removeprefix("unix://")
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_watched = 0
        self.num_cut = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL, while the block lasts."""
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(self._path)
        back = asyncio.create_task(self._pass_back(from_redis, writer))
        watches = False
        try:
            while data := await reader.read(1 << 16):
                if watches and not self.num_cut:
                    self.num_cut += 1
                    return
                watches = b"WATCH" in data
                self.num_watched += watches
                to_redis.write(data)
        finally:
            back.cancel()
            writer.close()
            to_redis.close()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()
