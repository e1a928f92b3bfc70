"""What was read to its end is kept for a shorter time, unless its id may be sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producer import Client, FinishReason, SamplingParams
from penstock.shared import errors
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection

from ..harness import claim_one, until, write

MINUTE_MS = 60_000


async def read_one(client: Client, broker: Broker, **options: Any) -> str:
    """Have one request answered to its end, and return its id."""
    reading = asyncio.ensure_future(client.generate("hi", **options))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    assert (await reading).finished
    return claim.request_id


async def ttls_ms(commands: CommandConnection, broker: Broker, request_id: str) -> list[int]:
    return [await commands.execute("PTTL", key(request_id)) for key in (broker.keys.request, broker.keys.log)]


async def test_a_read_answer_with_a_generated_id_is_kept_for_a_minute(client, broker, commands) -> None:
    request_id = await read_one(client, broker)

    async def is_shortened() -> bool:
        return all(0 < ttl_ms <= MINUTE_MS for ttl_ms in await ttls_ms(commands, broker, request_id))

    await until(is_shortened)


async def test_a_closing_client_reports_the_answers_it_has_read(
    redis_url, namespace, broker, commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.producer.requests.read_results.CLOSE_TIMEOUT_S", 60.0)
    async with Client.connect(redis_url, namespace=namespace) as client:
        mine = await read_one(client, broker, read_ttl_s=700)
        given = await read_one(client, broker, request_id="given")
    assert all(0 < ttl_ms <= 700_000 for ttl_ms in await ttls_ms(commands, broker, mine))
    assert all(ttl_ms > 700_000 for ttl_ms in await ttls_ms(commands, broker, given))


async def test_running_or_abandoned_requests_keep_their_time_to_live(client, broker, commands) -> None:
    request_id = await broker_request(client, broker)
    assert await broker.shorten([request_id, "unknown"], 1000) == 0
    assert await ttls_ms(commands, broker, request_id) == [-1, -1]


async def broker_request(client: Client, broker: Broker) -> str:
    """Build a request that runs, with a token in its log."""
    handle = await client.submit("hi", SamplingParams())
    await write(broker, await claim_one(broker), 0, 65)
    return handle.request_id


async def test_a_shorter_time_to_live_is_not_extended(client, broker, commands) -> None:
    handle = await client.submit("hi", SamplingParams())
    await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)
    await commands.execute("PEXPIRE", broker.keys.request(handle.request_id), 5000)
    assert await broker.shorten([handle.request_id], MINUTE_MS) == 0
    assert (await ttls_ms(commands, broker, handle.request_id))[0] <= 5000


@pytest.mark.parametrize("wrong", [-1, True, "60", float("nan"), 1e12])
async def test_an_invalid_read_ttl_is_refused_by_name(client, broker, wrong) -> None:
    with pytest.raises(errors.ValidationError, match="read_ttl_s must be a number of seconds"):
        await client.generate("hi", read_ttl_s=wrong)
    assert await broker.claims("e0") == []
