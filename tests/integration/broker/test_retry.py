"""Operators queue requests again that failed, were cancelled or expired, while their input is retained."""

from __future__ import annotations

from penstock.shared.broker import Broker, FinalRecord, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState

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


async def test_the_input_of_a_former_request_is_not_retried(broker: Broker, commands: CommandConnection) -> None:
    await broker.enqueue("a", b"former", result_ttl_ms=TTL_MS)
    await broker.cancel("a")
    await commands.execute("DEL", broker.keys.request("a"), broker.keys.log("a"))
    await broker.enqueue("a", b"another", result_ttl_ms=TTL_MS, client_id="c", client_ttl_ms=TTL_MS)
    await broker.cancel("a")
    assert not await broker.retry("a")
