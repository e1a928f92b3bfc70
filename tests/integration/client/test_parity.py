"""vLLM's ways of asking, with the engine played by the test through the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from penstock.producer import (
    Client,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from penstock.shared import errors
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.broker.ledger import DAY_S, Ledger
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import UnknownAdapterError
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest

from ...processes import DEADLINE_S
from .harness import claim_one, until, write

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


async def all_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def states(broker: Broker, *request_ids: str) -> list[str | None]:
    return [await broker.state(request_id) for request_id in request_ids]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RequestOutputKind.DELTA, {0: ["A", "B"], 1: ["A", "B"]}),
        (RequestOutputKind.CUMULATIVE, {0: ["A", "AB"], 1: ["A", "AB"]}),
        (RequestOutputKind.FINAL_ONLY, {0: ["AB"], 1: ["AB"]}),
    ],
)
async def test_outputs_of_two_answers(client: Client, broker: Broker, kind, expected: dict[int, list[str]]) -> None:
    params = SamplingParams(n=2, output_kind=kind)
    got: list[RequestOutput] = []

    async def read() -> None:
        async for output in client.stream_outputs("hi", params, request_id="r"):
            got.append(output)  # noqa: PERF401  # looked at meanwhile

    async def first_words() -> bool:
        return kind == RequestOutputKind.FINAL_ONLY or len(got) == 2

    reading = asyncio.ensure_future(read())
    claims = [await claim_one(broker) for _ in range(2)]
    for claim in claims:
        await write(broker, claim, 0, 65)
    await until(first_words)
    for claim in claims:
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    assert {(output.request_id, output.model, output.prompt) for output in got} == {("r", "m", "hi")}
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    answers = [answer for output in got for answer in output.outputs]
    assert {i: [a.text for a in answers if a.index == i] for i in range(2)} == expected
    # A handle, in any process, gives the same later.
    again = await all_of((await client.handle("r", n=2)).stream_outputs(RequestOutputKind.FINAL_ONLY))
    assert [answer.text for answer in again[0].outputs] == ["AB", "AB"]


async def test_leaving_outputs_early_cancels_and_errors_are_raised(client: Client, broker: Broker) -> None:
    outputs = client.stream_outputs("hi", request_id="r")
    first = asyncio.ensure_future(anext(outputs))
    await write(broker, await claim_one(broker), 0, 65)
    assert (await first).outputs[0].text == "A"
    await outputs.aclose()
    assert await states(broker, "r") == ["cancelled"]
    with pytest.raises(errors.UnknownModelError):
        await all_of(client.stream_outputs("hi", model="typo"))


async def test_an_error_of_the_callers_generator_is_raised_unchanged(client: Client, broker: Broker) -> None:
    class MyError(Exception):
        pass

    failure = MyError("mine")

    async def chunks() -> AsyncIterator[str]:
        yield "one"
        await until_claimed.wait()
        raise failure

    until_claimed = asyncio.Event()
    reading = asyncio.ensure_future(all_of(client.stream_outputs(chunks(), request_id="r")))
    await claim_one(broker)
    until_claimed.set()
    with pytest.raises(MyError) as caught:
        await reading
    assert caught.value is failure
    assert await states(broker, "r") == ["cancelled"]


async def test_adapter_and_trace_headers_are_sent_with_the_request(client: Client, broker: Broker) -> None:
    lora = LoRARequest("cats", 3, "/adapters/cats", digest="c" * 64)
    await client.add_request("r", "hi", lora_request=lora, trace_headers=TRACE, priority=-2)
    request = msgspec.msgpack.decode((await claim_one(broker)).payload, type=EngineCoreRequest)
    assert (request.request_id, request.priority) == ("r", -2)
    assert (request.lora_request, request.trace_headers) == (lora, TRACE)


async def test_abort_ends_all_answers_of_many_requests_whatever_their_number(client: Client, broker: Broker) -> None:
    await client.add_request("one", "hi")
    await client.add_request("three", "hi", SamplingParams(n=3))
    await client.add_request("parts", "hi", SamplingParams(n=2))
    await client.add_request("stays", "hi")
    running = await claim_one(broker)
    assert running.request_id == "one"
    await client.abort(["one", "three", "unknown", "x" * 200])
    await client.abort("parts~1", internal=True)
    assert await states(broker, "one", "three", "three~1", "three~2") == ["cancelled"] * 4
    assert await states(broker, "parts", "parts~1", "stays") == ["queued", "cancelled", "queued"]
    await client.abort("parts", internal=True)
    await client.abort("one")  # a second time does nothing
    assert await states(broker, "parts", "stays") == ["cancelled", "queued"]
    with pytest.raises(errors.UnknownModelError):
        await client.abort("stays", model="typo")


@pytest.mark.slow
async def test_a_thousand_requests_that_are_added_and_aborted_at_once_leave_nothing(
    redis_url: str, namespace: str, broker: Broker, commands: CommandConnection
) -> None:
    start = int(time.time())
    async with Client.connect(redis_url, namespace=namespace, result_ttl_s=1.0) as client:

        async def come_and_go(number: int) -> None:
            await client.add_request(f"r{number}", "hi", SamplingParams(n=1 + number % 2), tenant=f"t{number % 7}")
            await client.abort(f"r{number}")

        await asyncio.gather(*(come_and_go(number) for number in range(1000)))
        assert await client.get_num_unfinished_requests() == 0
        await client.wait_for_requests_to_drain()

    async def is_empty() -> bool:
        keys = await commands.execute("KEYS", broker.keys.prefix + "*")
        kinds = {key.decode().removeprefix(broker.keys.prefix).split(":")[0] for key in keys}
        # Sums, tenants' turns, events and use, which belong to the queue.
        return kinds <= {"queue", "idle", "events", "ledger"}

    await until(is_empty, timeout_s=60)
    rows = await Ledger(commands, [broker.keys]).read(start, int(time.time()) + DAY_S)
    assert {(row.tenant, row.key_name, row.adapter) for row in rows} == {(f"t{number}", "", "") for number in range(7)}
    assert sum(row.sums.cancelled for row in rows) == sum(row.sums.num_requests for row in rows) == 1500
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=9))).claims == []


async def test_an_aborting_pause_ends_running_and_keeps_waiting_requests(client: Client, broker: Broker) -> None:
    running = asyncio.ensure_future(client.generate("hi", request_id="running"))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    handed_back = await client.add_request("back", "hi")
    back = await claim_one(broker)
    await write(broker, back, 0, 66)
    await broker.release([(back.request_id, back.epoch)])
    await client.add_request("waiting", "hi")
    assert await client.pause_generation(mode="abort", clear_cache=True) == {}  # there is no engine to be asked
    answer = (await running).outputs[0]
    assert (answer.text, answer.finish_reason) == ("A", "abort")
    assert (await handed_back.result()).outputs[0].finish_reason == "abort"
    assert await states(broker, "running", "back", "waiting") == ["cancelled", "cancelled", "queued"]
    assert (await client.queue_stats()).depth == 1
    await client.wait_for_requests_to_drain(1)  # what a paused model has waiting does not run
    await client.resume_generation()
    with pytest.raises(errors.DrainTimeoutError, match=r"0 requests of model 'm' still run and 1 wait after 0\.1 s"):
        await client.wait_for_requests_to_drain(0.1)
    await write(broker, await claim_one(broker), 0, 67, end=FinishReason.STOP)
    await client.wait_for_requests_to_drain()
    assert not await client.has_unfinished_requests()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_rank": 1}, "data_parallel_rank is not supported: engines take requests by themselves"),
        ({"lora_request": 3}, "lora_request must be a LoRARequest or a name, got 3"),
        ({"trace_headers": {"traceparent": 1}}, "trace_headers must map strings to strings"),
        ({"trace_headers": {"baggage": "x" * 9000}}, "trace_headers must have at most 8192 characters, got 9007"),
    ],
)
async def test_wrong_or_unsupported_options_are_refused(client: Client, options: Any, message: str) -> None:
    for call in (client.submit, client.generate, client.encode):
        if call == client.encode and "not supported" not in message:
            continue
        with pytest.raises(errors.ValidationError, match=message):
            await call("hi", **options)


async def test_impossible_parameters_give_a_reason(client: Client) -> None:
    wrong = [
        (client.encode("hi"), errors.UnsupportedTaskError, "model 'm' does not embed; its tasks: generate"),
        (client.score("hi", "ho"), errors.UnsupportedTaskError, r"does not score: .* \(tasks of the model: generate"),
        (client.encode("hi", SamplingParams()), errors.ValidationError, "must be a PoolingParams, got SamplingParams"),  # pyright: ignore[reportArgumentType, reportCallIssue]
        (client.generate("hi", PoolingParams()), errors.ValidationError, "got PoolingParams; for pooling, use encode"),  # pyright: ignore[reportArgumentType]
        (client.submit(each("hi")), errors.ValidationError, "a prompt that grows chunk by chunk cannot be sent here"),  # pyright: ignore[reportArgumentType]
        (client.pause_generation(mode="drop"), errors.ValidationError, "mode must be one of abort, wait, keep"),  # pyright: ignore[reportArgumentType]
        (
            client.pause_generation(mode="abort", wait_for_inflight_requests=True),
            errors.ValidationError,
            "contradict each other",
        ),
        (client.reset_prefix_cache(reset_running_requests=1), errors.ValidationError, "must be True or False"),  # pyright: ignore[reportArgumentType]
        (client.wait_for_requests_to_drain(-1), errors.ValidationError, "drain_timeout_s must be"),
        (client.remove_lora(0), errors.ValidationError, "lora_id must be an integer of at least 1"),
        (client.add_lora("cats"), UnknownAdapterError, "model 'm' has no adapter 'cats'"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            await call
    with pytest.raises(errors.ValidationError, match="lora_int_id must be an integer of at least 1"):
        LoRARequest("cats", 0, "/adapters/cats")


async def each(*chunks: str) -> AsyncIterator[str]:
    for chunk in chunks:
        yield chunk


async def test_stats_are_logged_where_the_client_is(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.shared.process.log import configure_logging

    configure_logging("info", "json")
    await client.add_request("r", "hi")
    await client.do_log_stats()
    assert '"num_waiting": 1' in capsys.readouterr().err
