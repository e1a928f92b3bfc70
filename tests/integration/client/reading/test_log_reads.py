"""A record may be published while the reader reads the log, and a read may fail: nothing is lost by either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.producer.requests.reader import DeltaReader
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.errors import RedisUnavailableError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

from ....processes import DEADLINE_S
from ..harness import claim_one, write


class InterruptedBroker(Broker):
    """Runs ``after_read`` between the server's answer to a read of the log and its return to the reader."""

    after_read: Callable[[], Awaitable[None]] | None = None

    async def read_log(self, *arguments: Any, **options: Any) -> list[Delta]:
        """Read the log as ever; ``after_read`` runs once."""
        records = await super().read_log(*arguments, **options)
        after_read, self.after_read = self.after_read, None
        if after_read is not None:
            await after_read()
        return records


@pytest.fixture
async def subscriber(redis_url: str) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(redis_url)
    await subscriber.open()
    yield subscriber
    await subscriber.close()


async def tokens_of(reader: DeltaReader) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [token_id async for delta in reader for token_id in delta.token_ids]


async def test_records_published_during_a_read_of_the_log_are_delivered(
    broker: Broker, commands: CommandConnection, subscriber: Subscriber
) -> None:
    """No later record reveals a missing one, because the end itself arrives during the read."""
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    interrupted = InterruptedBroker(commands, broker.keys)
    reader = DeltaReader(interrupted, subscriber, "r")
    await reader.subscribe()
    is_published = asyncio.Event()
    second = await subscriber.subscribe(broker.keys.output("r"), lambda _: is_published.set())

    async def end_the_request() -> None:
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
        await is_published.wait()

    interrupted.after_read = end_the_request
    reader.catch_up()
    assert await tokens_of(reader) == [65, 66]
    subscriber.unsubscribe(second)
    reader.close()


async def test_a_read_of_the_log_that_failed_is_repeated_for_the_next_delta(
    broker: Broker, commands: CommandConnection, subscriber: Subscriber
) -> None:
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000)
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, 66, end=FinishReason.STOP)
    interrupted = InterruptedBroker(commands, broker.keys)
    reader = DeltaReader(interrupted, subscriber, "r")
    await reader.subscribe()

    async def fail() -> None:
        raise RedisUnavailableError("the connection was cut")

    interrupted.after_read = fail
    reader.catch_up()
    with pytest.raises(RedisUnavailableError):
        await anext(reader)
    assert await tokens_of(reader) == [65, 66]
    reader.close()
