"""Requests that live by whoever listens, and streams that go on elsewhere from the id of an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from penstock.producer import Client, Delta, FinishReason, SamplingParams
from penstock.producer.reconnect import StreamPosition, reconnect
from penstock.shared import errors
from penstock.shared.broker import Broker, Claim

from ....processes import DEADLINE_S
from ..harness import claim_one, until, write

LINGER_S = 0.6
# However long a busy machine needs to come back.
LONG_S = 600.0


@pytest.fixture
async def other(redis_url: str, namespace: str, broker: Broker) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace) as client:
        yield client


async def read(deltas: AsyncGenerator[Delta], position: StreamPosition, num_tokens: int) -> str:
    """Text of the next deltas, with the number of each one's answer, up to so many tokens."""
    said = ""
    async with asyncio.timeout(DEADLINE_S):
        while num_tokens > 0:
            delta = await anext(deltas)
            if position.advance(delta):
                said += "".join(f"{delta.child}{char}" for char in delta.text)
                num_tokens -= len(delta.token_ids)
    return said


async def claim_two(broker: Broker) -> tuple[Claim, Claim]:
    first, second = await claim_one(broker), await claim_one(broker)
    return (second, first) if second.request_id == "r" else (first, second)


@pytest.mark.usefixtures("reaper")
async def test_a_disconnected_reader_resumes_at_another_client_without_repeats(
    client: Client, other: Client, broker: Broker
) -> None:
    position = StreamPosition(2)
    async with aclosing(client.stream("hi", SamplingParams(n=2), request_id="r", linger_s=LONG_S)) as deltas:
        reading = asyncio.create_task(read(deltas, position, 4))
        zero, one = await claim_two(broker)
        await write(broker, zero, 0, 65, 66)
        await write(broker, one, 0, 97)
        await write(broker, one, 1, 98, end=FinishReason.STOP)
        assert sorted(await reading) == sorted("0A0B1a1b")
    cut = str(position)
    assert cut == "1,end"
    assert await broker.state("r") == "claimed", "its reader may come back"
    again = StreamPosition.parse(cut, 2)
    rest = reconnect(other, "r", again, linger_s=LONG_S)
    reading = asyncio.create_task(read(rest, again, 2))
    await write(broker, zero, 2, 67)
    await write(broker, zero, 3, 68, end=FinishReason.STOP)
    assert await reading == "0C0D"
    assert [delta async for delta in rest if again.advance(delta)] == []
    assert again.ended


@pytest.mark.usefixtures("reaper")
async def test_a_request_without_a_returning_reader_is_cancelled(client: Client, other: Client, broker: Broker) -> None:
    async def is_cancelled() -> bool:
        return await broker.state("r") == "cancelled"

    async with aclosing(client.stream("hi", request_id="r", linger_s=LINGER_S)) as deltas:
        reading = asyncio.create_task(read(deltas, StreamPosition(), 1))
        claim = await claim_one(broker)
        await write(broker, claim, 0, 65)
        assert await reading == "0A"
        following = (await other.handle("r")).stream(linger_s=LINGER_S)
        await anext(following)
    async with aclosing(following):
        left_at = asyncio.get_running_loop().time()
    await until(is_cancelled)
    assert asyncio.get_running_loop().time() - left_at >= LINGER_S / 2


@pytest.mark.parametrize("wrong", [-1, True, "5", float("inf")])
async def test_no_time_to_linger_is_refused(client: Client, wrong: object) -> None:
    with pytest.raises(errors.ValidationError, match="linger_s must be"):
        await client.submit("hi", linger_s=wrong)  # type: ignore[typeddict-item]  # that is the point
    with pytest.raises(errors.ValidationError, match="linger_s must be"):
        (await client.handle("r")).stream(linger_s=wrong)  # type: ignore[arg-type]  # that is the point
