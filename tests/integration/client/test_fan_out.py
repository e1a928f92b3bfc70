"""Requests for several answers, with the engine played by the test through the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from penstock.producer import Client, Delta, RequestOutputKind, SamplingParams
from penstock.shared import errors
from penstock.shared.broker import Broker, Claim, EngineCapacity, FinalRecord
from penstock.shared.messages.outcome import FinishReason, RequestError, Usage
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import derived_seed
from penstock.shared.queue.policy import QueuePolicy

from ...processes import DEADLINE_S
from .harness import claim_one, token_indexes, write

THREE = SamplingParams(n=3, seed=5)


async def claim_children(broker: Broker, request_id: str, n: int) -> list[Claim]:
    """Claim all children, in the order of their numbers."""
    claims = [await claim_one(broker) for _ in range(n)]
    by_id = {claim.request_id: claim for claim in claims}
    return [by_id[request_id if child == 0 else f"{request_id}~{child}"] for child in range(n)]


async def states(broker: Broker, request_id: str = "r", n: int = 3) -> list[str | None]:
    ids = [request_id, *(f"{request_id}~{child}" for child in range(1, n))]
    return [await broker.state(one) for one in ids]


async def into(stream: AsyncIterator[Delta], got: list[Delta]) -> None:
    async for delta in stream:
        got.append(delta)  # noqa: PERF401  # one at a time, so that a test sees them come


async def until_seen(got: list[Delta], wanted: set[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while {delta.child for delta in got} != wanted:
            await asyncio.sleep(0)


def of(child: int, deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if delta.child == child]


async def test_a_stream_of_three_marks_the_child_of_each_delta_and_ends_each_once(
    client: Client, broker: Broker
) -> None:
    got: list[Delta] = []
    reading = asyncio.ensure_future(into(client.stream("hi", THREE, request_id="r"), got))
    claims = await claim_children(broker, "r", 3)
    asked = [msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest).sampling_params for claim in claims]
    assert [(params.n, params.seed) for params in asked if params] == [(1, derived_seed(5, c)) for c in range(3)]
    for i in range(4):
        for child, claim in enumerate(claims):
            if i <= child + 1:  # two, three and four tokens
                await write(broker, claim, i, 65 + 10 * child + i, end=FinishReason.LENGTH if i == child + 1 else None)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    for child, tokens in enumerate(([65, 66], [75, 76, 77], [85, 86, 87, 88])):
        mine = of(child, got)
        assert token_indexes(mine) == list(range(len(tokens)))
        assert [t for delta in mine for t in delta.token_ids] == tokens
        assert [delta.finished for delta in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize(
    ("kind", "expected"), [(RequestOutputKind.CUMULATIVE, ["A", "AB"]), (RequestOutputKind.FINAL_ONLY, ["AB"])]
)
async def test_output_kinds_are_per_child(client: Client, broker: Broker, kind, expected: list[str]) -> None:
    got: list[Delta] = []
    params = SamplingParams(n=2, output_kind=kind)
    reading = asyncio.ensure_future(into(client.stream("hi", params, request_id="r"), got))
    claims = await claim_children(broker, "r", 2)
    for claim in claims:
        await write(broker, claim, 0, 65)
    if kind == RequestOutputKind.CUMULATIVE:
        await until_seen(got, {0, 1})
    for claim in claims:
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    for child in range(2):
        assert [delta.text for delta in of(child, got)] == expected


async def test_leaving_early_cancels_every_child_that_has_not_ended(client: Client, broker: Broker) -> None:
    async def read_two() -> None:
        seen = 0
        async for _ in client.stream("hi", THREE, request_id="r"):
            seen += 1
            if seen == 2:
                break

    reading = asyncio.ensure_future(read_two())
    claims = await claim_children(broker, "r", 3)
    await write(broker, claims[0], 0, 65, end=FinishReason.STOP)
    await write(broker, claims[1], 0, 65)
    await reading
    async with asyncio.timeout(DEADLINE_S):
        while await states(broker) != ["finished", "cancelled", "cancelled"]:
            await asyncio.sleep(0)


async def test_cancelling_the_awaiting_task_cancels_all(client: Client, broker: Broker) -> None:
    task = asyncio.ensure_future(client.generate("hi", THREE, request_id="r"))
    await claim_children(broker, "r", 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await states(broker) == ["cancelled"] * 3


async def test_generate_returns_all_answers_and_one_usage(client: Client, broker: Broker) -> None:
    task = asyncio.ensure_future(client.generate("hi", THREE, request_id="r"))
    claims = await claim_children(broker, "r", 3)
    for child, claim in reversed(list(enumerate(claims))):
        tokens = [65 + child] * (child + 1)
        delta = Delta(token_ids=tokens, text="".join(map(chr, tokens)), finish_reason=FinishReason.STOP)
        delta.usage = Usage(num_prompt_tokens=4, num_output_tokens=len(tokens))
        assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []
    output = await task
    assert output.request_id == "r"
    assert [(answer.index, answer.text) for answer in output.outputs] == [(0, "A"), (1, "BB"), (2, "CCC")]
    assert output.usage == Usage(num_prompt_tokens=4, num_output_tokens=6)


async def test_an_error_of_one_child_is_raised_after_its_output_and_cancels_the_others(client, broker) -> None:
    got: list[Delta] = []
    reading = asyncio.ensure_future(into(client.stream("hi", THREE, request_id="r"), got))
    claims = await claim_children(broker, "r", 3)
    await write(broker, claims[0], 0, 65)
    await write(broker, claims[2], 0, 66)
    await until_seen(got, {0, 2})
    end = Delta(finish_reason=FinishReason.ERROR, error=RequestError("engine_step_failed", "out of memory"))
    await broker.finish([FinalRecord("r~1", claims[1].epoch, end)])
    with pytest.raises(errors.RequestFailedError, match="out of memory"):
        await reading
    assert {delta.child for delta in got} == {0, 2}
    assert await states(broker) == ["cancelled", "failed", "cancelled"]


async def test_a_handle_acts_on_all_children_also_in_another_process(client, broker, redis_url, namespace) -> None:
    handle = await client.submit("hi", THREE, request_id="r")
    claims = await claim_children(broker, "r", 3)
    for child, claim in enumerate(claims[:2]):
        await write(broker, claim, 0, 65 + child, 75)
        await write(broker, claim, 2, 85, end=FinishReason.STOP)
    await write(broker, claims[2], 0, 67)
    async with Client.connect(redis_url, namespace=namespace) as other:
        elsewhere = await other.handle("r", n=3)
        got: list[Delta] = []
        reading = asyncio.ensure_future(into(elsewhere.stream(), got))
        await until_seen(got, {0, 1, 2})
        await elsewhere.cancel()
        await reading
    await handle.cancel()
    assert await states(broker) == ["finished", "finished", "cancelled"]
    output = await handle.result()
    assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [
        (0, "AKU", "stop"),
        (1, "BKU", "stop"),
        (2, "C", "cancelled"),
    ]
    assert ["".join(delta.text for delta in of(child, got)) for child in range(3)] == ["AKU", "BKU", "C"]


async def test_one_child_is_resumed_through_its_own_handle(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi", SamplingParams(n=2), request_id="r")
    for claim in await claim_children(broker, "r", 2):
        await write(broker, claim, 0, 65)
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    with pytest.raises(errors.ValidationError, match="one index for each of 2 answers"):
        handle.stream(after=0)
    assert [(delta.child, delta.text) async for delta in handle.stream(after=[1, 0])] == [(0, ""), (1, "B")]
    child = handle.child(1)
    assert (child.request_id, child.n) == ("r~1", 1)
    assert [delta.text async for delta in child.stream(after=0)] == ["B"]
    assert (await handle.child(0).result()).text == "AB"
    for wrong in (2, -1, True):
        with pytest.raises(errors.ValidationError, match=r"child must be in \[0, 2\)"):
            handle.child(wrong)


async def test_cancelling_too_many_children_names_the_unknown_one(client, broker) -> None:
    await client.submit("hi", SamplingParams(n=2), request_id="r")
    with pytest.raises(errors.RequestNotFoundError, match="'r~2' of model 'm' is unknown"):
        await (await client.handle("r", n=3)).cancel()
    assert await states(broker) == ["cancelled", "cancelled", None]


async def test_a_known_request_id_attaches_every_child_and_its_leaving_cancels_nothing(client, broker) -> None:
    await client.submit("hi", THREE, request_id="r")
    stream = client.stream("hi", THREE, request_id="r")
    first = asyncio.ensure_future(anext(stream))
    claims = await claim_children(broker, "r", 3)
    await write(broker, claims[1], 0, 65)
    assert ((await first).text, (await first).child) == ("A", 1)
    await stream.aclose()
    assert await states(broker) == ["claimed"] * 3
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=9))).claims == []


async def test_no_child_goes_out_if_one_is_too_large(redis_url: str, namespace: str, broker: Broker) -> None:
    """The last child has the longest id, so there is a limit that it alone exceeds."""
    async with Client.connect(redis_url, namespace=namespace) as client:
        await client.submit("hi", SamplingParams(seed=1, n=1), request_id="probe")
    limit = len((await claim_one(broker)).payload)
    async with Client.connect(redis_url, namespace=namespace, max_payload_bytes=limit) as client:
        with pytest.raises(errors.PayloadTooLargeError):
            await client.submit("hi", SamplingParams(seed=1, n=2), request_id="whole")
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=9))).claims == []


@pytest.mark.parametrize("call", [Client.submit, Client.generate])
async def test_fail_fast_without_engines_leaves_no_requests(client: Client, broker: Broker, call) -> None:
    with pytest.raises(errors.EngineDeadError):
        await call(client, "hi", THREE, request_id="r", fail_fast=True)
    assert await states(broker) == [None] * 3
    assert client.errored


async def test_a_partly_refused_submit_cancels_its_accepted_children(client: Client, broker: Broker) -> None:
    await client.configure_queue(QueuePolicy(max_queue_depth=2))
    with pytest.raises(errors.QueueFullError, match="max_queue_depth is 2 requests"):
        await client.submit("hi", THREE, request_id="r")
    assert await states(broker) == ["cancelled", "cancelled", None]


async def test_closing_the_client_cancels_all_children(redis_url, namespace, broker) -> None:
    client = await Client.connect(redis_url, namespace=namespace)
    reading = asyncio.ensure_future(anext(client.stream("hi", THREE, request_id="r")))
    await claim_children(broker, "r", 3)
    await client.close()
    assert await states(broker) == ["cancelled"] * 3
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
