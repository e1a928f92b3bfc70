"""What waits to be written, what does not, and that nothing is lost or repeated by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from penstock.shared.broker import Broker, Claim, EngineCapacity
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.serving import publisher as publisher_module
from penstock.worker.serving.publisher import Publisher
from penstock.worker.serving.redis_waiting import RedisPressure
from penstock.worker.serving.reporting.engine_meter import EngineMeter
from penstock.worker.serving.requests.generation import Generation
from penstock.worker.serving.requests.segments import Segment
from penstock.worker.text.tokenizer import TextCodec

from ...processes import DEADLINE_S

LONG_S = 600.0  # a test that waited for it would time out


class Step:
    """Steps of an engine that works on a few requests, handed to the publisher as the worker's service does."""

    def __init__(self, publisher: Publisher, generations: list[Generation]) -> None:
        self._publisher = publisher
        self.generations = generations
        self._now_s = 0.0

    def __call__(self, token_id: int, end: FinishReason | None = None) -> None:
        self._now_s += 0.001
        for generation in self.generations:
            output = EngineCoreOutput(generation.request_id, [token_id], end)
            generation.timing.note_output(output, self._now_s)
            delta, _ = generation.absorb(output)
            if delta is None:
                self._publisher.schedule(generation)
            else:
                self._publisher.publish(generation.request_id, generation.epoch, delta)


async def claim(broker: Broker, num_requests: int) -> list[Claim]:
    request = EngineCoreRequest(request_id="", prompt_token_ids=[5], sampling_params=SamplingParams(seed=1))
    payload = msgspec.msgpack.encode(request)
    for number in range(num_requests):
        await broker.enqueue(f"r{number}", payload, result_ttl_ms=60_000)
    return (await broker.claim("e0", EngineCapacity(max_num_seqs=num_requests))).claims


@asynccontextmanager
async def publishing(
    broker: Broker,
    codec: TextCodec,
    interval_s: float,
    on_stale: Callable[[str, int], None],
    num_requests: int = 1,
    pressure: RedisPressure | None = None,
) -> AsyncIterator[tuple[Publisher, Step]]:
    pressure = pressure or RedisPressure(broker._connection, broker.keys)
    publisher = Publisher(broker, on_stale, EngineMeter(), interval_s, lambda: pressure.pause_s)
    generations = []
    for one in await claim(broker, num_requests):
        request = EngineCoreRequest(
            request_id=one.request_id, prompt_token_ids=[5], sampling_params=SamplingParams(seed=1), epoch=one.epoch
        )
        generations.append(Generation(Segment(request, []), codec, one))
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher, Step(publisher, generations)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def log_of(broker: Broker, num_tokens: int, request_id: str = "r0") -> list[Delta]:
    """Wait until the log has so many tokens."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            deltas = await broker.read_log(request_id)
            if deltas and deltas[-1].next_index >= num_tokens:
                return deltas


def assert_never_stale(request_id: str, epoch: int) -> None:
    raise AssertionError(f"{request_id} of epoch {epoch} went stale")


async def test_first_tokens_and_ends_are_written_immediately_and_others_are_batched(broker, codec, monkeypatch) -> None:
    monkeypatch.setattr(publisher_module, "PAUSE_PER_DELTA_S", LONG_S)
    async with publishing(broker, codec, LONG_S, assert_never_stale) as (publisher, step):
        step(40)
        assert [delta.token_ids for delta in await log_of(broker, 1)] == [[40]]
        step(41)  # the first that may wait has none before it that it could wait after
        assert [delta.token_ids for delta in await log_of(broker, 2)] == [[40], [41]]
        step(42)
        step(43)
        step(44, FinishReason.LENGTH)
        deltas = await log_of(broker, 5)
        await publisher.flush()
    assert [delta.token_ids for delta in deltas] == [[40], [41], [42, 43, 44]]
    assert "".join(delta.text for delta in deltas) == codec.detokenizer(skip_special_tokens=True).add(
        [40, 41, 42, 43, 44]
    )
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.LENGTH]
    assert await broker.state("r0") == "finished"


async def test_a_few_streams_get_their_tokens_one_by_one(broker, codec) -> None:
    """However long the interval may be: so few deltas are not worth a wait."""
    async with publishing(broker, codec, LONG_S, assert_never_stale) as (_, step):
        for number in range(6):
            step(40 + number)
            await log_of(broker, number + 1)
    deltas = await broker.read_log("r0")
    assert [delta.token_ids for delta in deltas] == [[40 + number] for number in range(6)]


async def test_where_redis_is_short_of_time_a_few_streams_wait_too(broker, codec, commands) -> None:
    pressure = RedisPressure(commands, broker.keys)
    await pressure.check()
    assert pressure.pause_s == 0.0
    pressure.pause_s = LONG_S  # as after looks at a busy server
    async with publishing(broker, codec, LONG_S, assert_never_stale, pressure=pressure) as (publisher, step):
        step(40)
        await log_of(broker, 1)
        step(41)
        await log_of(broker, 2)
        step(42)
        step(43)
        await publisher.flush()
        deltas = await broker.read_log("r0")
    assert [delta.token_ids for delta in deltas] == [[40], [41], [42, 43]]


async def test_the_interval_bounds_the_wait(broker, codec, monkeypatch) -> None:
    monkeypatch.setattr(publisher_module, "PAUSE_PER_DELTA_S", LONG_S)
    async with publishing(broker, codec, 0.02, assert_never_stale, num_requests=3) as (_, step):
        for number in range(10):
            step(40 + number)
        logs = [await log_of(broker, 10, f"r{number}") for number in range(3)]
    for deltas in logs:
        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(40, 50))
        assert [delta.index for delta in deltas] == [0, *(delta.next_index for delta in deltas[:-1])]


async def test_an_interval_of_zero_writes_as_fast_as_calls_can_follow_each_other(broker, codec, monkeypatch) -> None:
    monkeypatch.setattr(publisher_module, "PAUSE_PER_DELTA_S", LONG_S)
    async with publishing(broker, codec, 0.0, assert_never_stale) as (_, step):
        for number in range(4):
            step(40 + number)
            assert len(await log_of(broker, number + 1)) == number + 1


async def test_a_flush_does_not_wait(broker, codec, monkeypatch) -> None:
    monkeypatch.setattr(publisher_module, "PAUSE_PER_DELTA_S", LONG_S)
    async with publishing(broker, codec, LONG_S, assert_never_stale, num_requests=2) as (publisher, step):
        for number in range(8):
            step(40 + number)
            await asyncio.sleep(0)
        await publisher.flush()
        for request_id in ("r0", "r1"):
            assert (await broker.read_log(request_id))[-1].next_index == 8
        await publisher.flush()  # nothing is left to wait for


async def test_of_many_deltas_none_is_left_out(broker, codec) -> None:
    """A missing delta would make the next one stale, because its index would not fit."""
    async with publishing(broker, codec, 0.0, assert_never_stale, num_requests=3) as (publisher, step):
        for number in range(120):
            step(40 + number % 10)
            if number % 3 == 0:
                await publisher.flush()
        step(50, FinishReason.LENGTH)
        await publisher.flush()
    for request_id in ("r0", "r1", "r2"):
        log = await broker.read_log(request_id)
        assert [token for delta in log for token in delta.token_ids] == [*(40 + n % 10 for n in range(120)), 50]
        assert log[-1].finish_reason is FinishReason.LENGTH


async def test_pending_tokens_of_a_lost_claim_are_not_written(broker, codec, monkeypatch) -> None:
    monkeypatch.setattr(publisher_module, "PAUSE_PER_DELTA_S", LONG_S)
    stale: list[tuple[str, int]] = []
    async with publishing(broker, codec, LONG_S, lambda *claim: stale.append(claim)) as (publisher, step):
        step(40)
        step(41)
        await log_of(broker, 2)
        step(42)
        await broker.cancel("r0")
        publisher.forget("r0")
        await publisher.flush()
        assert stale == []
        step(43)
        await publisher.flush()
        assert stale == [("r0", step.generations[0].epoch)]
    assert [token_id for delta in await broker.read_log("r0") for token_id in delta.token_ids] == [40, 41]


async def test_deltas_of_two_claims_of_a_request_are_not_merged(broker, codec) -> None:
    """The second owner must not write the pending deltas of the first."""
    stale: list[tuple[str, int]] = []
    async with publishing(broker, codec, 0.0, lambda *claim: stale.append(claim)) as (publisher, step):
        first = step.generations[0]
        assert await broker.release([("r0", first.epoch)]) == 1
        (second,) = (await broker.claim("e1", EngineCapacity(max_num_seqs=1))).claims
        publisher.publish("r0", first.epoch, Delta(index=0, token_ids=[40], text="a"))
        publisher.publish("r0", second.epoch, Delta(index=0, token_ids=[41], text="b"))
        await publisher.flush()
    assert [(delta.token_ids, delta.text) for delta in await broker.read_log("r0")] == [([41], "b")]
    assert stale == []
