"""Resumable requests against a real Redis: chunks are added once, segments end under a fence, and input closes."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shared import errors
from penstock.shared.broker import Broker, Claim, DeadLetter, Queue, SegmentRecord
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import InputChunk
from penstock.shared.queue.policy import TenantPolicy

from .conftest import (
    CAUSE,
    TTL_MS,
    assert_nothing_is_left,
    die,
    enqueue,
    final,
    finish_with,
    record,
    served_per_s,
    take,
)
from .snapshot import read_snapshot


def chunk(text: str) -> InputChunk:
    return InputChunk(prompt=text)


def segment(claim: Claim, number: int, index: int, *token_ids: int) -> SegmentRecord:
    """The last record of a segment; of the prompt a hundred tokens are known by then."""
    end = SegmentEnd(number, index + len(token_ids), FinishReason.LENGTH)
    usage = Usage(num_prompt_tokens=100, num_output_tokens=index + len(token_ids))
    delta = Delta(index=index, token_ids=list(token_ids), segment_ends=[end], usage=usage)
    return SegmentRecord(claim.request_id, claim.epoch, delta)


async def open_request(broker: Broker, request_id: str = "a", **options) -> None:
    await enqueue(broker, request_id, is_resumable=True, **options)


async def texts(broker: Broker, request_id: str = "a") -> list[str | None]:
    chunks = await broker.input.read(request_id)
    return [msgspec.msgpack.decode(data, type=InputChunk).prompt for data in chunks]


async def test_a_request_goes_from_segment_to_segment_and_ends_when_its_input_is_closed(
    broker, queue, commands
) -> None:
    await open_request(broker)
    (first,) = await take(broker, "e0", 1)
    assert await broker.append([record("a", 1, 0, 7)]) == []
    assert await broker.end_segments([segment(first, 0, 1, 8)]) == []
    assert await broker.state("a") == "awaiting_input"
    assert await broker.claims("e0") == []
    stats = await queue.stats()
    assert (stats.depth, stats.num_running, stats.num_awaiting_input) == (0, 0, 1)
    assert await take(broker, "e0", 5) == []
    assert await broker.input.extend("a", 1, chunk("b"))
    (second,) = await take(broker, "e1", 5)
    assert (second.attempt, second.num_logged_tokens, second.payload) == (2, 2, b"payload")
    await broker.input.close("a")
    assert await broker.end_segments([segment(second, 1, 2, 9)]) == []
    log = await broker.read_log("a")
    assert [(delta.index, delta.token_ids) for delta in log] == [(0, [7]), (1, [8]), (2, [9]), (3, [])]
    assert [delta.finish_reason for delta in log] == [None, None, None, "length"]
    assert log[-1].usage == Usage(100, 3)
    assert await broker.state("a") == "finished"
    assert await texts(broker) == ["b"]
    assert 0 < await commands.execute("PTTL", broker.keys.input("a")) <= TTL_MS
    await commands.execute("DEL", broker.keys.input("a"))
    await assert_nothing_is_left(commands, broker)


async def test_closing_the_input_ends_a_request_that_waits_for_it_without_any_engine(broker, subscriber) -> None:
    published: list[bytes] = []
    await subscriber.subscribe(broker.keys.output("a"), published.append)
    await open_request(broker)
    (claim,) = await take(broker, "e0", 1)
    assert await broker.end_segments([segment(claim, 0, 0, 7)]) == []
    await die(broker, "e0", external=True)
    for _ in range(2):
        await broker.input.close("a")
    assert await broker.state("a") == "finished"
    await subscriber.subscribe(broker.keys.output("barrier"), lambda _: None)
    assert [msgspec.msgpack.decode(data, type=Delta) for data in published] == await broker.read_log("a")
    assert [delta.finished for delta in await broker.read_log("a")] == [False, True]


async def test_a_chunk_that_is_sent_again_is_added_once_whatever_has_happened_since(broker: Broker) -> None:
    await open_request(broker)
    assert [await broker.input.extend("a", 1, chunk("b")) for _ in range(2)] == [True, False]
    (claim,) = await take(broker, "e0", 1)
    assert not await broker.input.extend("a", 1, chunk("b"))
    assert await broker.input.extend("a", 2, chunk("c"))
    assert await texts(broker) == ["b", "c"]
    assert await broker.finish([final("a", claim.epoch, 0, 7)]) == []
    assert not await broker.input.extend("a", 2, chunk("c"))


async def test_invalid_chunks_are_refused_with_a_reason(broker: Broker) -> None:
    await enqueue(broker, "plain")
    await open_request(broker)
    extend = broker.input.extend
    assert await extend("a", 1, chunk("b"))
    for request_id, number, text, error, said in (
        ("never", 1, "b", errors.RequestNotFoundError, "unknown"),
        ("plain", 1, "b", errors.ValidationError, "not resumable"),
        ("a", 1, "other", errors.ValidationError, "has another chunk 1"),
        ("a", 0, "b", errors.ValidationError, "has another chunk 0"),
        ("a", 3, "b", errors.BrokerError, "number 3 leaves a gap"),
    ):
        with pytest.raises(error, match=said):
            await extend(request_id, number, chunk(text))
    with pytest.raises(errors.PayloadTooLargeError, match=r"1 chunks .* chunk 2"):
        await extend("a", 2, chunk("c"), max_chunks=1)
    with pytest.raises(errors.PayloadTooLargeError, match="50 bytes"):
        await extend("a", 2, chunk("c" * 50), max_bytes=50)
    await broker.input.close("a")
    with pytest.raises(errors.InputClosedError, match="was closed"):
        await extend("a", 2, chunk("c"))
    await broker.cancel("a")
    with pytest.raises(errors.InputClosedError, match=r"has ended \(cancelled\)"):
        await extend("a", 2, chunk("c"))
    with pytest.raises(errors.ValidationError, match="not resumable"):
        await broker.input.close("plain")
    assert await texts(broker) == ["b"]


async def test_the_bound_on_input_holds_for_all_chunks_together(broker: Broker) -> None:
    await open_request(broker)
    size = len(msgspec.msgpack.encode(chunk("c" * 40)))
    for number in (1, 2):
        assert await broker.input.extend("a", number, chunk("c" * 40), max_bytes=2 * size)
    with pytest.raises(errors.PayloadTooLargeError, match=f"{2 * size} bytes"):
        await broker.input.extend("a", 3, chunk("c"), max_bytes=2 * size)


async def test_the_end_of_a_segment_is_fenced_and_written_once(broker: Broker) -> None:
    await open_request(broker)
    await broker.input.extend("a", 1, chunk("b"))
    (stale,) = await take(broker, "e0", 1)
    await broker.release([("a", stale.epoch)])
    (claim,) = await take(broker, "e1", 1)
    assert await broker.end_segments([segment(stale, 0, 0, 99)]) == ["a"]
    assert await broker.end_segments([segment(claim, 0, 5, 99)]) == ["a"], "it would leave a gap"
    assert await broker.end_segments([segment(claim, 1, 0, 99)]) == ["a"], "it is not this segment's turn"
    for _ in range(2):  # the reply of the first was lost
        assert await broker.end_segments([segment(claim, 0, 0, 7)]) == []
    assert await broker.append([record("a", claim.epoch, 1, 8)]) == ["a"]
    (again,) = await take(broker, "e0", 1)
    assert await broker.end_segments([segment(claim, 1, 1, 99)]) == ["a"]
    assert await broker.end_segments([segment(again, 1, 1, 8)]) == []
    assert [delta.token_ids for delta in await broker.read_log("a")] == [[7], [8]]


async def test_one_refusal_leaves_the_other_segments_of_the_step_alone(broker: Broker) -> None:
    for request_id in "abc":
        await open_request(broker, request_id)
    claims = await take(broker, "e0", 3)
    await broker.cancel("b")
    assert await broker.end_segments([segment(claim, 0, 0, 7) for claim in claims]) == ["b"]
    assert [await broker.state(request_id) for request_id in "abc"] == ["awaiting_input", "cancelled", "awaiting_input"]


async def test_waiting_for_input_ends_by_cancellation_deadline_or_the_death_of_the_client(broker, commands) -> None:
    await open_request(broker, "cancelled")
    await open_request(broker, "expired", timeout_ms=600_000)
    await open_request(broker, "vanished", client_id="c0", client_ttl_ms=600_000)
    claims = await take(broker, "e0", 3)
    assert await broker.end_segments([segment(claim, 0, 0, 7) for claim in claims]) == []
    assert await broker.cancel("cancelled") == "cancelled"
    # The server's clock cannot be moved, so the deadline is.
    await commands.execute("ZADD", broker.keys.prefix + "deadlines", 0, "expired")
    assert await broker.expire() == 1
    await commands.execute("ZADD", broker.keys.clients, "XX", 0, "c0")
    for _ in range(2):
        await broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=0)
    for request_id in ("cancelled", "expired"):
        *_, end = await broker.read_log(request_id)
        assert (end.index, end.finish_reason) == (1, request_id)
    assert await broker.state("vanished") == "cancelled"
    await assert_nothing_is_left(commands, broker)


async def test_a_segment_is_reclaimed_after_a_death_and_keeps_input_added_meanwhile(broker: Broker) -> None:
    await open_request(broker)
    (claim,) = await take(broker, "e0", 1)
    await broker.end_segments([segment(claim, 0, 0, 7)])
    await broker.input.extend("a", 1, chunk("b"))
    (claim,) = await take(broker, "e0", 1)
    await broker.append([record("a", claim.epoch, 1, 8)])
    assert await die(broker, "e0", external=True) == (1, 0)
    await broker.input.extend("a", 2, chunk("c"))
    (claim,) = await take(broker, "e1", 1)
    assert (claim.attempt, claim.num_logged_tokens) == (3, 2)
    assert await texts(broker) == ["b", "c"]
    assert await broker.end_segments([segment(claim, 1, 2, 9)]) == []
    assert await broker.state("a") == "queued"


async def test_a_segment_that_ends_clears_the_request_of_former_deaths(broker: Broker) -> None:
    await open_request(broker)
    for _ in range(2):
        await take(broker, "e0", 1)
        assert await die(broker, "e0", external=False) == (1, 0)
    (claim,) = await take(broker, "e0", 1)
    assert claim.alone_until == 8, "it is a suspect"
    await broker.end_segments([segment(claim, 0, 0, 7)])
    await broker.input.extend("a", 1, chunk("b"))
    (claim,) = await take(broker, "e0", 1)
    assert claim.alone_until == -1
    assert await die(broker, "e0", external=False) == (1, 0)


async def test_an_engine_death_between_segments_does_not_affect_the_request(broker: Broker) -> None:
    await open_request(broker)
    (claim,) = await take(broker, "e0", 1)
    await broker.end_segments([segment(claim, 0, 0, 7)])
    assert await die(broker, "e0", external=False) == (0, 0)
    assert await broker.state("a") == "awaiting_input"


async def test_chunks_count_in_lane_and_reckoning_and_the_engine_corrects_them(broker, queue: Queue, commands) -> None:
    await open_request(broker, num_prompt_tokens=10, max_tokens=5)
    await broker.input.extend("a", 1, chunk("b"), num_prompt_tokens=20, max_tokens=5)
    stats = await queue.stats()
    assert (stats.depth, stats.num_tokens) == (1, 40)
    (claim,) = await take(broker, "e0", 1)
    assert claim.num_kv_tokens == 30 + 5
    assert (await queue.stats()).num_tokens == 0
    await broker.input.extend("a", 2, chunk("c"), num_prompt_tokens=7, max_tokens=5)
    for number in range(3):
        await broker.end_segments([segment(claim, number, number, 7)])
        if number < 2:
            (claim,) = await take(broker, "e0", 1)
    assert await commands.execute("HGET", broker.keys.request("a"), "prompt") == b"100"
    await broker.input.close("a")
    await commands.execute("DEL", broker.keys.input("a"))
    await assert_nothing_is_left(commands, broker)


async def test_a_tenant_is_charged_at_the_end_of_each_segment(broker: Broker, queue: Queue, commands) -> None:
    """The token quota shows the charge: 100 prompt tokens and one output token per segment."""
    policy = TenantPolicy(tokens_per_minute=1000)
    await queue.configure_tenant("acme", policy)
    await open_request(broker, tenant="acme", num_prompt_tokens=10, max_tokens=5)
    used: list[int] = []
    for number in range(2):
        (claim,) = await take(broker, "e0", 1)
        await broker.end_segments([segment(claim, number, number, 7)])
        used.append(int(await commands.execute("HGET", broker.keys.prefix + "usage:acme", "tokens")))
        await broker.input.extend("a", number + 1, chunk("b"), num_prompt_tokens=10)
    assert used == [101, 102]
    await broker.cancel("a")  # with a chunk of 10 tokens that it had not begun with
    assert await commands.execute("HGET", broker.keys.prefix + "usage:acme", "tokens") == b"112"


async def test_each_segment_moves_the_tenants_turn(broker: Broker, queue: Queue) -> None:
    """A tenant with segments above the estimate is served after one that used its estimate."""
    await open_request(broker, tenant="acme", num_prompt_tokens=10, max_tokens=5)
    await enqueue(broker, "theirs", tenant="other", num_prompt_tokens=40, max_tokens=5)
    claims = {claim.request_id: claim for claim in await take(broker, "e0", 2)}
    await broker.end_segments([segment(claims["a"], 0, 0, 7)])  # of 101 tokens
    await enqueue(broker, "ours again", tenant="acme")
    await enqueue(broker, "theirs again", tenant="other")
    (claim,) = await take(broker, "e0", 1)
    assert claim.request_id == "theirs again"


async def test_time_without_input_is_no_slow_service(broker: Broker, commands) -> None:
    """The server's clock cannot be moved, so the test moves the recorded times."""
    await open_request(broker)
    (claim,) = await take(broker, "e0", 1)
    await broker.end_segments([segment(claim, 0, 0, 7)])
    noted = await commands.execute("HMGET", broker.keys.prefix + "queue", "rate_at", "idle_at")
    began, ended = (int(ms) - 3_600_000 for ms in noted)
    await commands.execute("HSET", broker.keys.prefix + "queue", "rate_at", began - 500, "idle_at", ended)
    await broker.input.close("a")
    assert 50 < await served_per_s(commands, broker, "tokens") <= 100 / 0.5


async def test_others_may_end_while_a_request_waits_for_input(broker: Broker, queue: Queue) -> None:
    """The last one at work ends, and then the one that waits: nothing was under way in between."""
    await open_request(broker)
    await enqueue(broker, "b")
    waiting, other = await take(broker, "e0", 2)
    assert await broker.end_segments([segment(waiting, 0, 0, 7)]) == []
    assert await broker.cancel(other.request_id) == "cancelled"
    assert (await queue.stats()).num_running == 0
    assert await broker.cancel("a") == "cancelled"
    assert (await queue.stats()).num_running == 0


async def test_a_parked_request_is_replayed_with_exactly_its_previous_input(broker: Broker, commands) -> None:
    dead_letter = DeadLetter(commands, broker.keys)
    await open_request(broker)
    await broker.input.extend("a", 1, chunk("b"))
    (claim,) = await take(broker, "e0", 1)
    assert await broker.park(claim, CAUSE, "validation_error", "unreadable")
    await commands.execute("DEL", broker.keys.request("a"), broker.keys.input("a"), broker.keys.log("a"))  # expired
    assert await dead_letter.replay("a")
    assert await texts(broker) == ["b"]
    with pytest.raises(errors.InputClosedError, match="was closed"):
        await broker.input.extend("a", 2, chunk("c"))
    for number in range(2):
        (claim,) = await take(broker, "e0", 1)
        await broker.end_segments([segment(claim, number, number, 7)])
    assert await broker.state("a") == "finished"


async def test_a_request_that_is_not_resumable_has_no_trace_of_it(broker: Broker, commands) -> None:
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    await finish_with(broker, claim, num_output=1)
    found = await read_snapshot(commands, broker.keys)
    assert found.of("input") == {}
    assert not {"chunks", "segments", "closed", "input_bytes"} & found.of("request")["a"].keys()
