"""Operators queue requests again that failed, were cancelled or expired, while their input is retained."""

from __future__ import annotations

import msgspec
import pytest

from penstock.producer import Client, ModelCard
from penstock.shared.broker import Broker, FinalRecord, Queue, RequestFilter, RequestHistory
from penstock.shared.broker.bulk import count_matching, retry_matching
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RETRYABLE_STATES, RequestState

from .conftest import TTL_MS, enqueue, held, record, take


async def test_a_failed_request_is_retried_from_its_prompt(broker: Broker, commands: CommandConnection) -> None:
    await enqueue(broker, "a", tenant="acme")
    (claim,) = await take(broker, "e", 1)
    assert await broker.append([record("a", 1, 0, 7)]) == []
    assert not await broker.retry("a"), "it runs"
    delta = Delta(index=1, token_ids=[], finish_reason=FinishReason.ERROR)
    assert await broker.finish([FinalRecord(*held("a"), delta)]) == []
    assert await broker.state("a") is RequestState.FAILED
    assert 0 < await commands.execute("PTTL", broker.keys.retry("a")) <= TTL_MS
    assert await broker.retry("a")
    assert await commands.execute("EXISTS", broker.keys.retry("a"), broker.keys.log("a")) == 0
    (again,) = await take(broker, "e", 1)
    assert (again.payload, again.num_logged_tokens) == (claim.payload, 0)
    assert again.epoch > claim.epoch


async def test_a_cancelled_request_is_retried_and_another_of_its_id_is_not(broker: Broker) -> None:
    await enqueue(broker, "a")
    await broker.cancel("a")
    assert await broker.retry("a")
    assert await broker.state("a") is RequestState.QUEUED
    assert not await broker.retry("a")


async def test_a_finished_an_interactive_and_a_purged_request_are_not_retried(
    broker: Broker, commands: CommandConnection
) -> None:
    await broker.enqueue("watched", b"prompt", result_ttl_ms=TTL_MS, client_id="c", client_ttl_ms=TTL_MS)
    await broker.enqueue("purged", b"prompt", result_ttl_ms=TTL_MS, tenant="acme")
    await broker.cancel("watched")
    await Queue(commands, broker.keys).purge("acme")
    for request_id in ("watched", "purged", "unknown"):
        assert not await broker.retry(request_id), request_id
        assert not await commands.execute("EXISTS", broker.keys.retry(request_id))


async def test_all_that_match_are_retried_once_and_the_last_move_decides(
    broker: Broker, commands: CommandConnection
) -> None:
    history = RequestHistory(commands, broker.keys)
    await enqueue(broker, "a", "b", tenant="acme")
    await broker.enqueue("watched", b"p", result_ttl_ms=TTL_MS, tenant="acme", client_id="c", client_ttl_ms=TTL_MS)
    await enqueue(broker, "other", tenant="shop")
    for request_id in ("a", "b", "watched", "other"):
        await broker.cancel(request_id)
    seconds, micros = await commands.execute("TIME")
    cancelled_by = int(seconds) + int(micros) / 1e6
    acme = RequestFilter(tenant="acme")
    assert await count_matching(history, acme, RETRYABLE_STATES) == 3
    assert await retry_matching(history, RequestFilter(until=1.0), cancelled_by) == 0
    assert await retry_matching(history, acme, cancelled_by) == 2
    assert [await broker.state(one) for one in ("a", "b", "watched", "other")] == [
        RequestState.QUEUED,
        RequestState.QUEUED,
        RequestState.CANCELLED,
        RequestState.CANCELLED,
    ]
    await take(broker, "e", 1)
    ended = await history.requests(RequestFilter(states=("ended",), until=cancelled_by))
    assert {request.request_id for request in ended} == {"watched", "other"}
    with pytest.raises(ValidationError, match=r"states must include cancelled or expired or failed, got running"):
        await retry_matching(history, RequestFilter(states=("running",)), cancelled_by)


async def test_a_client_counts_and_retries_the_requests_of_a_filter(
    broker: Broker, commands: CommandConnection, redis_url: str, namespace: str
) -> None:
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(ModelCard(model="m")))
    for request_id in ("a", "b"):
        await broker.enqueue(request_id, b"prompt", result_ttl_ms=TTL_MS, tenant="acme")
    async with Client.connect(redis_url, namespace=namespace) as client:
        assert await client.cancel_requests(RequestFilter(tenant="acme")) == 2
        cancelled = RequestFilter(states=("cancelled",), tenant="acme")
        assert await client.count_requests(cancelled, states=RETRYABLE_STATES) == 2
        assert await client.retry_requests(cancelled) == 2
        assert await client.retry_requests(cancelled) == 0
        entries = [one for one in await Audit(commands, Keys(namespace)).read() if one.action == "request.retry_all"]
        assert [(one.target, one.result, one.details["retried"]) for one in entries] == [
            ("m", "ok", "0"),
            ("m", "ok", "2"),
        ]
        for change in (client.retry_requests, client.cancel_requests):
            with pytest.raises(
                ValidationError, match="the filter is empty; set one of states, tenant, band, engine_id"
            ):
                await change(RequestFilter())
    assert [await broker.state(one) for one in ("a", "b")] == [RequestState.QUEUED] * 2


async def test_the_input_of_a_former_request_is_not_retried(broker: Broker, commands: CommandConnection) -> None:
    await broker.enqueue("a", b"former", result_ttl_ms=TTL_MS)
    await broker.cancel("a")
    await commands.execute("DEL", broker.keys.request("a"), broker.keys.log("a"))
    await broker.enqueue("a", b"another", result_ttl_ms=TTL_MS, client_id="c", client_ttl_ms=TTL_MS)
    await broker.cancel("a")
    assert not await broker.retry("a")
