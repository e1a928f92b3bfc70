"""What Redis says of an engine that the engine does not know: claims whose reply was lost are handed back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest

from penstock.shared.broker import Broker, EngineCapacity, Record, Wave
from penstock.shared.connection import RETRY_FOR_S, CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.messages.core import Ready
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.partitions import Layout
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.serving.claiming import CHECK_UNKNOWN_EVERY_S, ClaimLoop
from penstock.worker.serving.core.client import CoreClient
from penstock.worker.serving.partitions.served_partitions import ServedPartition, ServedPartitions
from penstock.worker.serving.publisher import Publisher
from penstock.worker.serving.redis_waiting import RedisPressure
from penstock.worker.serving.reporting.engine_meter import EngineMeter
from penstock.worker.serving.reporting.observers import RequestLog
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.serving.requests.running_generations import RunningGenerations
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

from ...captured_logs import capture_logs
from ...every_exception import Panic, raising
from ...redis_server import DEADLINE_S, RedisServer

CONFIG = WorkerConfig(worker_id="e", engine_id="e0", redis_url="", engine=EngineConfig(model="m"), lease_ttl_s=600)


class CountingBroker(Broker):
    """Counts the claims that it was asked for."""

    num_claims = 0

    async def claim(self, *args: Any, **options: Any) -> Wave:
        """Claim as it always does."""
        self.num_claims += 1
        return await super().claim(*args, **options)


class Core:
    """An engine core that is given requests and runs none."""

    def __init__(self) -> None:
        self.request_ids: asyncio.Queue[str] = asyncio.Queue()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.request_ids.put_nowait(request.request_id)


@pytest.fixture
def ready(demo_model: Path) -> Ready:
    sizes: dict[str, Any] = {
        "max_model_len": 100,
        "num_blocks": 100,
        "block_size": 16,
        "vocab_size": 100,
        "kv_cache_size_tokens": 1600,
    }
    return Ready(
        model_folder=str(demo_model), architecture="", dtype="", device="", eos_token_ids=[], max_num_seqs=8, **sizes
    )


def part_of(broker: Broker) -> ServedPartition:
    publisher = Publisher(broker, lambda request_id, epoch: None, EngineMeter())
    return ServedPartition(broker, publisher, RedisPressure(broker._connection, broker.keys))


async def one_partition() -> Layout:
    return Layout()


@asynccontextmanager
async def claiming(broker: Broker, codec: TextCodec, ready: Ready) -> AsyncIterator[tuple[ClaimLoop, Core]]:
    core, live = Core(), RunningGenerations()
    parts = ServedPartitions("e0", lambda number: part_of(broker), one_partition)
    loop = ClaimLoop(CONFIG, parts, cast(CoreClient, core), live, RequestLog("m", is_on=False))
    running = asyncio.create_task(loop.run(Intake(codec, ready), ready))
    try:
        yield loop, core
    finally:
        loop.stop()
        await running


async def error_of(broker: Broker, request_id: str) -> RequestError:
    """Wait for the end of a request, and return its error."""
    async with asyncio.timeout(DEADLINE_S):
        while not (log := await broker.read_log(request_id)):
            await asyncio.sleep(0.01)
    assert log[-1].error is not None
    return log[-1].error


async def enqueue(broker: Broker, request_id: str) -> None:
    request = EngineCoreRequest(request_id=request_id, prompt_token_ids=[5], sampling_params=SamplingParams(seed=1))
    await broker.enqueue(request_id, msgspec.msgpack.encode(request), result_ttl_ms=60_000)


async def claim_unseen(broker: Broker) -> int:
    """A claim of this engine of which it never heard; returns its epoch."""
    (claim,) = (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims
    return claim.epoch


async def test_claims_of_a_previous_process_are_claimed_again(broker: Broker, codec: TextCodec, ready: Ready) -> None:
    await enqueue(broker, "a")
    epoch = await claim_unseen(broker)
    async with claiming(broker, codec, ready) as (_, core), asyncio.timeout(DEADLINE_S):
        core_id = await core.request_ids.get()
    assert core_id.startswith("a#")
    assert core_id != f"a#{epoch}"


async def test_a_claim_with_a_lost_reply_is_released(broker: Broker, codec: TextCodec, ready: Ready) -> None:
    async with claiming(broker, codec, ready) as (loop, core), asyncio.timeout(DEADLINE_S):
        await enqueue(broker, "a")
        loop.wake()
        first = await core.request_ids.get()
        await loop.pause()
        await enqueue(broker, "b")
        epoch = await claim_unseen(broker)
        loop.parts[0].may_hold_unknown = True
        loop.resume()
        second = await core.request_ids.get()
    assert (first.partition("#")[0], second.partition("#")[0]) == ("a", "b")
    assert second != f"b#{epoch}"
    # What it knew of all the time stayed where it was.
    held = {RunningGenerations.core_id(*claim) for claim in await broker.claims("e0")}
    assert held == {first, second}


async def test_unknown_claims_are_searched_periodically_without_a_failure(
    broker: Broker, codec: TextCodec, ready: Ready
) -> None:
    """A reply may be lost without an error, and Redis may lose its last second unnoticed."""
    async with claiming(broker, codec, ready) as (loop, core), asyncio.timeout(DEADLINE_S):
        await enqueue(broker, "a")
        loop.wake()
        await core.request_ids.get()
        await loop.pause()
        await enqueue(broker, "b")
        epoch = await claim_unseen(broker)
        part = loop.parts[0]
        assert not part.may_hold_unknown
        part.unknown_checked_at -= 2 * CHECK_UNKNOWN_EVERY_S
        loop.resume()
        second = await core.request_ids.get()
    assert second.startswith("b#")
    assert second != f"b#{epoch}"


class LatePublisher(Publisher):
    """Writes nothing until it is flushed."""

    writing: asyncio.Task[None] | None = None

    async def flush(self) -> None:
        self.writing = self.writing or asyncio.create_task(self.run())
        await super().flush()


async def test_an_end_that_is_not_written_yet_is_not_taken_for_an_unknown_claim(
    broker: Broker, codec: TextCodec, ready: Ready
) -> None:
    """Redis still counts the request as claimed, and this engine has forgotten it: it must not run again."""
    async with claiming(broker, codec, ready) as (loop, core), asyncio.timeout(DEADLINE_S):
        part = loop.parts[0]
        publisher = part.publisher = LatePublisher(broker, lambda request_id, epoch: None, EngineMeter())
        await enqueue(broker, "a")
        loop.wake()
        await core.request_ids.get()
        await loop.pause()
        ((request_id, epoch),) = await broker.claims("e0")
        publisher.publish(request_id, epoch, Delta(index=0, token_ids=[5], finish_reason=FinishReason.STOP))
        loop._live.remove(request_id)
        await enqueue(broker, "b")
        part.may_hold_unknown = True
        loop.resume()
        assert (await core.request_ids.get()).startswith("b#")
        assert await broker.state("a") == "finished"
        assert publisher.writing is not None
        publisher.writing.cancel()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.start()
    server.wait_until_ready()
    yield server
    server.kill()


@asynccontextmanager
async def broker_at(
    server: RedisServer, kind: type[Broker] = Broker, *, retry_for_s: float = RETRY_FOR_S
) -> AsyncIterator[Broker]:
    commands = CommandConnection(server.url, retry_for_s=retry_for_s)
    try:
        yield kind(commands, Keys("test").model("m"))
    finally:
        await commands.close()


async def test_the_search_for_unknown_claims_waits_for_redis(
    server: RedisServer, codec: TextCodec, ready: Ready
) -> None:
    """An end that could not be written meanwhile is written first, so that its request does not run again."""
    async with broker_at(server, retry_for_s=math.inf) as broker, claiming(broker, codec, ready) as (loop, core):
        async with asyncio.timeout(DEADLINE_S):
            part = loop.parts[0]
            publisher = part.publisher = LatePublisher(broker, lambda request_id, epoch: None, EngineMeter())
            await enqueue(broker, "ended")
            loop.wake()
            await core.request_ids.get()
            await loop.pause()
            ((request_id, ended_epoch),) = await broker.claims("e0")
            await enqueue(broker, "unseen")
            epoch = await claim_unseen(broker)
            assert not part.may_hold_unknown
            server.kill()
            publisher.publish(request_id, ended_epoch, Delta(index=0, token_ids=[5], finish_reason=FinishReason.STOP))
            loop._live.remove(request_id)
            part.unknown_checked_at -= 2 * CHECK_UNKNOWN_EVERY_S
            with capture_logs() as events:
                loop.resume()
                while not any(event["event"] == "redis_away" for event in events):
                    await asyncio.sleep(0.01)
            assert core.request_ids.empty()
            server.start()
            core_id = await core.request_ids.get()
            assert core_id.startswith("unseen#")
            assert core_id != f"unseen#{epoch}"
            assert await broker.state("ended") == "finished"
            assert {RunningGenerations.core_id(*claim) for claim in await broker.claims("e0")} == {core_id}
            assert core.request_ids.empty()
            assert publisher.writing is not None
            publisher.writing.cancel()


class LosingBroker(Broker):
    """Loses its Redis whenever it reads a log or parks a request, as often as ``servers`` has entries."""

    servers: ClassVar[list[RedisServer]] = []

    async def read_log(self, *args: Any, **options: Any) -> list[Delta]:
        """Read the log, after losing Redis."""
        self._lose()
        return await super().read_log(*args, **options)

    async def park(self, *args: Any, **options: Any) -> Any:
        """Park the request, after losing Redis."""
        self._lose()
        return await super().park(*args, **options)

    def _lose(self) -> None:
        if self.servers:
            self.servers.pop().kill()


@pytest.mark.parametrize("is_readable", [True, False])
async def test_a_request_that_cannot_be_prepared_without_redis_is_queued_again(
    server: RedisServer, codec: TextCodec, ready: Ready, is_readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_at(server, LosingBroker, retry_for_s=0.0) as broker, asyncio.timeout(DEADLINE_S):
        if is_readable:
            await enqueue(broker, "a")
        else:
            await broker.enqueue("a", b"no request", result_ttl_ms=60_000)
        (claim,) = (await broker.claim("e1", EngineCapacity(max_num_seqs=1))).claims
        await broker.append([Record("a", claim.epoch, Delta(index=0, token_ids=[5]))])
        await broker.release([("a", claim.epoch)])
        monkeypatch.setattr(LosingBroker, "servers", [server])
        with capture_logs() as events:
            async with claiming(broker, codec, ready) as (_, core):
                while not any(event["event"] == "claim_failed" for event in events):
                    await asyncio.sleep(0.01)
                server.start()
                await asyncio.to_thread(server.wait_until_ready)
                if is_readable:
                    assert (await core.request_ids.get()).startswith("a#")
                else:
                    while await broker.state("a") != "parked":
                        await asyncio.sleep(0.01)
        assert not any(event["event"] == "request_refused" for event in events)


class MeetingBroker(Broker):
    """Reads logs only when all of ``meeting`` are being read."""

    meeting: ClassVar[asyncio.Barrier]

    async def read_log(self, *args: Any, **options: Any) -> list[Delta]:
        """Read the log once the others are read, too."""
        await self.meeting.wait()
        return await super().read_log(*args, **options)


async def test_the_logs_of_a_wave_are_read_together(
    commands: CommandConnection, namespace: str, codec: TextCodec, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death all requests of an engine resume, and each would wait for the logs of those before it."""
    broker, names = MeetingBroker(commands, Keys(namespace).model("m")), ("a", "b", "c")
    for name in names:
        await enqueue(broker, name)
    claims = (await broker.claim("e1", EngineCapacity(max_num_seqs=len(names)))).claims
    await broker.append([Record(each.request_id, each.epoch, Delta(index=0, token_ids=[5])) for each in claims])
    await broker.release([(each.request_id, each.epoch) for each in claims])
    monkeypatch.setattr(MeetingBroker, "meeting", asyncio.Barrier(len(names)), raising=False)
    async with claiming(broker, codec, ready) as (_, core), asyncio.timeout(DEADLINE_S):
        assert sorted([(await core.request_ids.get())[0] for _ in names]) == sorted(names)


async def test_a_partial_claim_is_not_followed_by_another(
    commands: CommandConnection, namespace: str, codec: TextCodec, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.shared.broker.broker.IDLE_POLL_S", 600.0)
    broker = CountingBroker(commands, Keys(namespace).model("m"))
    await enqueue(broker, "a")
    async with claiming(broker, codec, ready) as (loop, core), asyncio.timeout(DEADLINE_S):
        await core.request_ids.get()
        await broker.claims("e0")  # what was sent before is answered
        await enqueue(broker, "b")
        loop.wake()
        await core.request_ids.get()
    assert broker.num_claims == 2


async def test_an_engine_claims_again_after_invalid_requests(
    broker: Broker, codec: TextCodec, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis counts the invalid requests as held, and would wake no engine for the next ones."""
    monkeypatch.setattr("penstock.shared.broker.broker.IDLE_POLL_S", 600.0)
    for number in range(8):
        await broker.enqueue(f"wrong{number}", b"no request", result_ttl_ms=60_000)
    await enqueue(broker, "a")
    async with claiming(broker, codec, ready) as (_, core), asyncio.timeout(DEADLINE_S):
        assert (await core.request_ids.get()).startswith("a#")


@pytest.mark.parametrize("kind", [Exception, RecursionError, SystemExit, KeyboardInterrupt, GeneratorExit, Panic])
async def test_a_request_with_text_that_cannot_be_prepared_ends_alone(
    broker: Broker, codec: TextCodec, ready: Ready, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.text.tokenizer.encode", raising(kind))
    template = "{% macro deep() %}{{ deep() }}{% endmacro %}{% if tools %}{{ deep() }}{% endif %}"
    codec = TextCodec(codec._tokenizer, ChatTemplate(template, {}))
    requests = {
        "tokenizer": {"prompt": "fail"},
        "template": {"messages": [], "chat_template_kwargs": {"tools": [1]}},
        "unknown": {},
        "fine": {"prompt_token_ids": [5]},
    }
    params = SamplingParams(seed=1)
    for request_id, fields in requests.items():
        request = EngineCoreRequest(request_id=request_id, sampling_params=params, **fields)
        await broker.enqueue(request_id, msgspec.msgpack.encode(request), result_ttl_ms=60_000)
    async with claiming(broker, codec, ready) as (loop, core):
        writing = asyncio.create_task(loop.parts[0].publisher.run())
        async with asyncio.timeout(DEADLINE_S):
            assert (await core.request_ids.get()).startswith("fine#")
        failing = [request_id for request_id in requests if request_id != "fine"]
        codes = {request_id: (await error_of(broker, request_id)).code for request_id in failing}
        writing.cancel()
        assert {claim for claim, _ in await broker.claims("e0")} == {"fine"}
    assert codes == {"tokenizer": "tokenizer_failed", "template": "validation_error", "unknown": "validation_error"}


async def test_a_request_with_an_unexpected_failure_ends_alone(
    broker: Broker, codec: TextCodec, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers failures in the worker's own code."""
    check = Intake._checked

    def fail_on_seed_2(self: Intake, params: SamplingParams, **options: Any) -> SamplingParams:
        return check(self, params, **options) if params.seed != 2 else raising(SystemExit)()

    monkeypatch.setattr(Intake, "_checked", fail_on_seed_2)
    for request_id, seed in (("failing", 2), ("fine", 1)):
        request = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=[5], sampling_params=SamplingParams(seed=seed)
        )
        await broker.enqueue(request_id, msgspec.msgpack.encode(request), result_ttl_ms=60_000)
    async with claiming(broker, codec, ready) as (loop, core):
        writing = asyncio.create_task(loop.parts[0].publisher.run())
        async with asyncio.timeout(DEADLINE_S):
            assert (await core.request_ids.get()).startswith("fine#")
        error = await error_of(broker, "failing")
        writing.cancel()
    assert (error.code, error.message) == ("request_failed", "the request failed: SystemExit: on purpose")
