"""A request_id belongs to one request: who gives it to another is told so, and gets nothing of the first one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest

from penstock.producer import Client, Delta, RequestOutputKind, SamplingParams
from penstock.shared import errors
from penstock.shared.broker import Broker, DeadLetter
from penstock.shared.messages.outcome import FinishReason

from .harness import CAUSE, claim_one, write

PARAMS = SamplingParams(max_tokens=5)
CHAT = [{"role": "user", "content": "hi"}]


async def ended(client: Client, broker: Broker, prompt: Any = "hi", params: Any = PARAMS, **options: Any) -> None:
    """A request "r" that has answered "A"."""
    await client.submit(prompt, params, request_id="r", **options)
    await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)


async def deltas_of(stream: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in stream]


@pytest.mark.parametrize(
    ("field", "prompt", "params", "options"),
    [
        ("tenant", "hi", PARAMS, {"tenant": "other"}),
        ("prompt", "ho", PARAMS, {}),
        ("prompt", [1, 2], PARAMS, {}),
        ("prompt", CHAT, PARAMS, {}),
        ("prompt", "hi", PARAMS, {"tokenization_kwargs": {"add_special_tokens": False}}),
        ("params", "hi", SamplingParams(max_tokens=6), {}),
        ("params", "hi", SamplingParams(max_tokens=5, seed=1), {}),
        ("params", "hi", SamplingParams(max_tokens=5, n=2), {}),
    ],
)
@pytest.mark.parametrize("has_ended", [False, True])
async def test_another_request_of_a_known_id_is_refused(
    client: Client, broker: Broker, field: str, prompt: Any, params: Any, options: dict[str, Any], has_ended: bool
) -> None:
    if has_ended:
        await ended(client, broker)
    else:
        await client.submit("hi", PARAMS, request_id="r")
    calls: list[Awaitable[Any]] = [
        client.submit(prompt, params, request_id="r", **options),
        client.generate(prompt, params, request_id="r", **options),
        deltas_of(client.stream(prompt, params, request_id="r", **options)),
    ]
    for call in calls:
        with pytest.raises(errors.RequestConflictError, match=f"request_id 'r' belongs to .*{field}") as caught:
            await call
        assert (caught.value.field, caught.value.code, caught.value.retryable) == (field, "request_conflict", False)
    assert await broker.state("r") == ("finished" if has_ended else "queued")
    assert (await client.queue_stats()).depth == (0 if has_ended else 1)


@pytest.mark.parametrize(
    ("prompt", "params", "again"),
    [
        ("hi", PARAMS, SamplingParams(max_tokens=5)),
        ([1, 2], None, SamplingParams()),
        (CHAT, PARAMS, SamplingParams(max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)),
        ("hi", SamplingParams(seed=7), SamplingParams(seed=7)),
    ],
)
async def test_the_same_request_attaches(client: Client, broker: Broker, prompt: Any, params: Any, again: Any) -> None:
    await ended(client, broker, prompt, params, tenant="t", timeout_s=600)
    if prompt is CHAT:
        prompt = [{"content": "hi", "role": "user"}]
    output = await client.generate(prompt, again, request_id="r", tenant="t", band="batch", priority=3)
    assert output.text == "A"


async def test_simultaneous_submits_of_different_prompts_conflict(client: Client, broker: Broker) -> None:
    prompts = ["one", "two", "one", "three"]
    results = await asyncio.gather(
        *(client.submit(prompt, PARAMS, request_id="r") for prompt in prompts), return_exceptions=True
    )
    assert [isinstance(result, errors.RequestConflictError) for result in results] == [False, True, False, True]
    claim = await claim_one(broker)
    assert msgspec.msgpack.decode(claim.payload)[13] == "one"


async def test_a_request_of_an_older_client_is_attached_to_by_its_tenant(client: Client, broker: Broker) -> None:
    """The record of the older client has no digests."""
    await broker.enqueue("r", b"payload", result_ttl_ms=60_000, call="0123-4-5", tenant="t")
    assert (await client.submit("whatever", PARAMS, request_id="r", tenant="t")).request_id == "r"
    with pytest.raises(errors.RequestConflictError) as caught:
        await client.submit("whatever", PARAMS, request_id="r")
    assert caught.value.field == "tenant"


async def test_a_generated_id_belongs_to_the_tenant_of_its_request(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi", PARAMS, tenant="t")
    assert (await client.submit("hi", PARAMS, request_id=handle.request_id, tenant="t")).request_id == handle.request_id
    with pytest.raises(errors.RequestConflictError):
        await client.submit("hi", PARAMS, request_id=handle.request_id, tenant="other")


@pytest.mark.parametrize("request_id", ["x~1", "x~63", "x~64", "~7", "a~b~2"])
async def test_an_id_of_a_further_answer_cannot_be_chosen(client: Client, request_id: str) -> None:
    for n in (1, 2):
        with pytest.raises(errors.ValidationError, match="request_id must not end in '~' and a number"):
            await client.submit("hi", SamplingParams(n=n), request_id=request_id)
    assert (await client.queue_stats()).depth == 0


async def test_other_ids_with_a_tilde_have_separate_answers(client: Client, broker: Broker) -> None:
    await client.submit("hi", SamplingParams(n=3), request_id="x")
    for name in ("x~", "x~a", "x~0", "x~01", "~", "x~1a"):
        handle = await client.submit("ho", SamplingParams(n=2), request_id=name)
        assert handle.request_id == name
    assert (await client.queue_stats()).depth == 3 + 6 * 2
    await client.abort("x~a")
    assert [await broker.state(name) for name in ("x~a", "x~a~1", "x~1")] == ["cancelled", "cancelled", "queued"]


async def test_a_parked_request_is_still_compared_when_it_is_queued_again(
    client: Client, broker: Broker, commands
) -> None:
    await client.submit("hi", PARAMS, request_id="r")
    await claim_one(broker)
    await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=1)
    assert await DeadLetter(commands, broker.keys).replay("r")
    with pytest.raises(errors.RequestConflictError) as caught:
        await client.submit("ho", PARAMS, request_id="r")
    assert caught.value.field == "prompt"
    assert (await client.submit("hi", PARAMS, request_id="r")).request_id == "r"
