"""Every move of ``shared/queue/lifecycle.py`` is made by a script, and no script can make another."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from redis.exceptions import ResponseError

from penstock.shared.broker import Broker, DeadLetter, FinalRecord, SegmentRecord
from penstock.shared.broker.script import PARTS
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import InputClosedError
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import InputChunk
from penstock.shared.queue.lifecycle import MOVES, RequestState, moves_as_lua
from penstock.shared.redis_access.script import linked_text

from .conftest import die, enqueue, final, held, record, take

ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"

QUEUED, CLAIMED, AWAITING_INPUT = RequestState.QUEUED, RequestState.CLAIMED, RequestState.AWAITING_INPUT
FINISHED, FAILED, CANCELLED = RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED
EXPIRED, PARKED = RequestState.EXPIRED, RequestState.PARKED


async def bring_to(broker: Broker, state: RequestState) -> None:
    """A resumable request "a" that no engine needs to wait for, of which engine e0 knows."""
    await broker.renew("e0", [])
    await enqueue(broker, "a", is_resumable=True, fail_fast=True, deadline_ms=4_000_000_000_000)
    if state is not QUEUED:
        await take(broker, "e0", 1)
    if state is AWAITING_INPUT:
        await end_segment(broker)
    assert await broker.state("a") is state


async def end_segment(broker: Broker) -> None:
    end = SegmentEnd(number=0, next_index=1, finish_reason=FinishReason.STOP)
    usage = Usage(num_prompt_tokens=1, num_output_tokens=1)
    delta = Delta(index=0, token_ids=[7], segment_ends=[end], usage=usage)
    assert await broker.end_segments([SegmentRecord(*held("a", 1), delta)]) == []


async def claim(broker: Broker) -> None:
    await take(broker, "e0", 1)


async def die_unserved(broker: Broker) -> None:
    await die(broker, "e0", external=True)


async def cancel(broker: Broker) -> None:
    await broker.cancel("a")


async def pass_deadline(broker: Broker) -> None:
    """The server's clock cannot be moved, so the deadline is."""
    commands = broker._connection
    await commands.execute("HSET", broker.keys.request("a"), "deadline", 0)
    await commands.execute("ZADD", broker.keys.prefix + "deadlines", 0, "a")
    assert await broker.expire(grace_ms=0) == 1


async def damage(broker: Broker) -> None:
    """Nobody knows how many chunks of input it has, which whoever adds one finds out."""
    await broker._connection.execute("HSET", broker.keys.request("a"), "chunks", "many")
    with pytest.raises(InputClosedError, match="parked"):
        await broker.input.extend("a", 1, InputChunk(prompt_token_ids=[1]), num_prompt_tokens=1, max_tokens=1)


async def release(broker: Broker) -> None:
    assert await broker.release([held("a", 1)]) == 1


async def finish(broker: Broker) -> None:
    assert await broker.finish([final("a", 1, 0, 7)]) == []


async def fail(broker: Broker) -> None:
    assert await broker.finish([FinalRecord(*held("a", 1), Delta(index=0, finish_reason=FinishReason.ERROR))]) == []


async def park(broker: Broker) -> None:
    assert await die(broker, "e0", external=False, max_deliveries=1) == (0, 1)


async def extend(broker: Broker) -> None:
    await broker.input.extend("a", 1, InputChunk(prompt_token_ids=[1]), num_prompt_tokens=1, max_tokens=1)


async def close_input(broker: Broker) -> None:
    await broker.input.close("a")


SCENES: dict[tuple[RequestState, RequestState], Callable[[Broker], Awaitable[None]]] = {
    (QUEUED, CLAIMED): claim,
    (QUEUED, FAILED): die_unserved,
    (QUEUED, CANCELLED): cancel,
    (QUEUED, EXPIRED): pass_deadline,
    (QUEUED, PARKED): damage,
    (CLAIMED, QUEUED): release,
    (CLAIMED, AWAITING_INPUT): end_segment,
    (CLAIMED, FINISHED): finish,
    (CLAIMED, FAILED): fail,
    (CLAIMED, CANCELLED): cancel,
    (CLAIMED, EXPIRED): pass_deadline,
    (CLAIMED, PARKED): park,
    (AWAITING_INPUT, QUEUED): extend,
    (AWAITING_INPUT, FINISHED): close_input,
    (AWAITING_INPUT, FAILED): die_unserved,
    (AWAITING_INPUT, CANCELLED): cancel,
    (AWAITING_INPUT, EXPIRED): pass_deadline,
    (AWAITING_INPUT, PARKED): damage,
}
ALLOWED = {(before, after) for before, following in MOVES.items() for after in following}


def test_each_move_has_its_scene() -> None:
    assert SCENES.keys() == ALLOWED


@pytest.mark.parametrize(("before", "after"), SCENES)
async def test_every_transition_of_the_table_happens(broker: Broker, before: RequestState, after: RequestState) -> None:
    await bring_to(broker, before)
    await SCENES[before, after](broker)
    assert await broker.state("a") is after


@pytest.mark.parametrize("before", RequestState)
async def test_other_moves_are_refused(commands, broker: Broker, before: RequestState) -> None:
    text = linked_text("-- uses: lib\nmove(KEYS[1], ARGV[2], ARGV[3], 'engine', 'e9')\n", PARTS, moves_as_lua())
    key = broker.keys.request("a")
    for after in set(RequestState) - {after for start, after in ALLOWED if start is before}:
        await commands.execute("HSET", key, "state", before)
        with pytest.raises(ResponseError, match=f"cannot go from {before} to {after}"):
            await commands.execute("EVAL", text, 1, key, broker.keys.prefix, before, after)
        assert await commands.execute("HGETALL", key) == [b"state", before.encode()]


async def test_a_parked_request_lives_anew(broker: Broker) -> None:
    await bring_to(broker, CLAIMED)
    await park(broker)
    assert await DeadLetter(broker._connection, broker.keys).replay("a")
    assert await broker.state("a") is QUEUED


def test_the_drawing_has_these_moves() -> None:
    drawn = re.findall(r"^ +(\w+) --> (\w+): ", ARCHITECTURE.read_text(), re.MULTILINE)
    assert sorted(drawn) == sorted((str(before), str(after)) for before, after in ALLOWED)


async def test_a_webhook_is_sent_the_last_record_of_its_request(broker: Broker, commands: CommandConnection) -> None:
    """The last record has the end and the usage; earlier records do not."""
    await enqueue(broker, "a", webhook="target")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.append([record("a", claim.epoch, 0, 7)]) == []
    assert await broker.finish([final("a", claim.epoch, 1, 8)]) == []
    ((_, flat),) = await commands.execute("XRANGE", broker.keys.outbox, "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    end = msgspec.msgpack.decode(fields[b"record:a"], type=Delta)
    assert (end.index, end.token_ids, end.finish_reason) == (1, [8], FinishReason.STOP)
