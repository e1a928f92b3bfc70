"""The client against a real Redis, with the worker's writes made by the test through the broker."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from penstock.producer import Client, RequestOutputKind, SamplingParams
from penstock.producer.inputs.prompt import build_request
from penstock.shared import errors
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.messages.requests import EngineCoreRequest

from .harness import DEADLINE_S, claim_one, token_indexes, until_followed, write


async def test_stream_yields_each_token_once_in_order_and_one_end(client: Client, broker: Broker) -> None:
    stream = client.stream("hi", SamplingParams(max_tokens=5))
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, 66)
    assert (await first).text == "AB"
    await write(broker, claim, 2, 67)
    await write(broker, claim, 3, 68, end=FinishReason.LENGTH)
    rest = [delta async for delta in stream]
    assert "".join(delta.text for delta in rest) == "CD"
    assert rest[0].index == 2
    assert [delta.finish_reason for delta in rest if delta.finished] == ["length"]


async def test_generate_returns_the_whole_text_and_sends_all_parameters(client, broker) -> None:
    params = SamplingParams(temperature=0.5, top_k=7, stop=["x"])
    task = asyncio.ensure_future(client.generate([1, 2, 3], params, request_id="mine", priority=3))
    claim = await claim_one(broker)
    request = msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)
    assert (request.request_id, request.prompt_token_ids, request.priority) == ("mine", [1, 2, 3], 3)
    assert request.sampling_params is not None
    assert request.sampling_params.seed is not None
    assert msgspec.structs.replace(request.sampling_params, seed=None) == params
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    output = await task
    assert (output.text, output.outputs[0].token_ids, output.request_id) == ("A", [65], "mine")


@pytest.mark.parametrize(
    ("kind", "expected"), [(RequestOutputKind.CUMULATIVE, ["A", "AB"]), (RequestOutputKind.FINAL_ONLY, ["AB"])]
)
async def test_output_kinds(client: Client, broker: Broker, kind: RequestOutputKind, expected: list[str]) -> None:
    stream = client.stream("hi", SamplingParams(output_kind=kind))
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    if kind == RequestOutputKind.CUMULATIVE:
        assert (await first).text == "A"
    await write(broker, claim, 1, 66, end=FinishReason.STOP)
    texts = [(await first).text, *[delta.text async for delta in stream]]
    assert texts == expected


async def test_leaving_a_stream_early_cancels_the_request(client: Client, broker: Broker) -> None:
    async def read_one() -> None:
        async for _ in client.stream("hi", request_id="r"):
            break

    reading = asyncio.ensure_future(read_one())
    await write(broker, await claim_one(broker), 0, 65)
    await reading
    async with asyncio.timeout(DEADLINE_S):
        while await broker.state("r") != "cancelled":
            await asyncio.sleep(0)


async def test_cancelling_the_awaiting_task_cancels_the_request(client: Client, broker: Broker) -> None:
    task = asyncio.ensure_future(client.generate("hi", request_id="r"))
    await claim_one(broker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await broker.state("r") == "cancelled"


async def test_closing_the_client_cancels_streamed_but_not_submitted_requests(redis_url, namespace, broker):
    client = await Client.connect(redis_url, namespace=namespace)
    stream = client.stream("hi", request_id="streamed")
    reading = asyncio.ensure_future(anext(stream))
    await client.submit("hi", request_id="submitted")
    await claim_one(broker)
    await claim_one(broker)
    await client.close()
    assert await broker.state("streamed") == "cancelled"
    assert await broker.state("submitted") == "claimed"
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_a_handle_reads_a_detached_result_later_and_from_where_it_stopped(client, broker) -> None:
    handle = await client.submit("hi", request_id="r")
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, 66)
    await write(broker, claim, 2, 67)
    await write(broker, claim, 3, 68, end=FinishReason.STOP)
    assert (await handle.result()).text == "ABCD"
    again = await client.handle("r")
    assert [d.text async for d in again.stream(after=1)] == ["CD"]
    assert [(d.text, d.finish_reason) async for d in again.stream(after=3)] == [("", "stop")]


# Records of tokens as an engine writes them that returns several tokens a step.
CUTS = ((65, 66, 67), (68,), (69, 70), (71, 72))


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("after", range(-1, 11))
async def test_a_stream_begins_after_any_token(client: Client, broker: Broker, after: int, is_running: bool) -> None:
    handle = await client.submit("hi", request_id="r")
    claim = await claim_one(broker)

    async def read() -> list[Delta]:
        return [delta async for delta in handle.stream(after=after)]

    reading = asyncio.ensure_future(read()) if is_running else None
    index = 0
    for tokens in CUTS:
        await write(broker, claim, index, *tokens, end=FinishReason.LENGTH if tokens is CUTS[-1] else None)
        index += len(tokens)
    deltas = await (reading or read())
    expected = list(range(65, 73))[after + 1 :]
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert "".join(delta.text for delta in deltas) == "".join(map(chr, expected))
    assert token_indexes(deltas) == list(range(after + 1, index))
    assert [delta.finish_reason for delta in deltas if delta.finished] == ["length"]


async def test_a_record_of_an_older_worker_is_refused_within_its_text(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi", request_id="r")
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, 66, text="AB")
    await write(broker, claim, 2, end=FinishReason.STOP)
    assert [delta.text async for delta in handle.stream(after=1)] == [""]
    with pytest.raises(errors.ValidationError, match="after=0 is inside the delta of tokens 0 to 1, which a worker of"):
        await anext(handle.stream(after=0))


async def test_a_replay_has_a_delta_that_begins_at_the_border(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi")
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, 66)
    await write(broker, claim, 2, 67)
    await write(broker, claim, 3, 68)
    await write(broker, claim, 4, end=FinishReason.STOP)
    for border, texts in ((0, ["ABCD"]), (1, ["A", "BCD"]), (2, ["AB", "CD"]), (3, ["ABC", "D"]), (4, ["ABCD", ""])):
        assert [delta.text async for delta in handle.replay([border])] == texts


async def test_two_readers_follow_one_request(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi")
    results = [asyncio.ensure_future(handle.result()) for _ in range(2)]
    claim = await claim_one(broker)
    for i in range(20):
        await write(broker, claim, i, 65 + i)
    await write(broker, claim, 20, end=FinishReason.LENGTH)
    texts = {(await result).text for result in results}
    assert texts == {"ABCDEFGHIJKLMNOPQRST"}


async def test_a_known_request_id_attaches_and_its_leaving_cancels_nothing(client, broker) -> None:
    await client.submit("hi", request_id="r")
    stream = client.stream("hi", request_id="r")
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    assert (await first).text == "A"
    await stream.aclose()
    await write(broker, claim, 1, 66, end=FinishReason.STOP)
    assert (await client.generate("hi", request_id="r")).text == "AB"
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims == []


async def test_deltas_that_wait_for_a_slow_reader_are_merged(client: Client, broker: Broker) -> None:
    stream = client.stream("hi", request_id="r")
    first = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    await first
    for i in range(1, 10):
        await write(broker, claim, i, 65 + i)
    await write(broker, claim, 10, end=FinishReason.STOP)
    await client.models()  # a round trip, so that the channel has been read
    rest = [delta async for delta in stream]
    assert "".join(d.text for d in rest) == "BCDEFGHIJ"
    assert len(rest) < 10


async def test_a_lost_subscription_is_restored_without_gap_or_repeat(client, broker, commands) -> None:
    stream = client.stream("hi", request_id="r")
    got = []

    async def read() -> None:
        got.extend([delta async for delta in stream])

    reading = asyncio.ensure_future(read())
    claim = await claim_one(broker)
    for i in range(60):
        await write(broker, claim, i, 65)
        if i % 10 == 5:
            await commands.execute("CLIENT", "KILL", "TYPE", "pubsub")
    await write(broker, claim, 60, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        await reading
    indexes = [delta.index + k for delta in got for k in range(len(delta.token_ids))]
    assert indexes == list(range(60))
    assert sum(delta.finished for delta in got) == 1


async def test_a_lost_command_connection_is_opened_again(client, broker, commands) -> None:
    handle = await client.submit("hi")
    await commands.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    assert (await handle.result()).text == "A"


async def test_an_error_of_the_engine_reaches_the_caller(client: Client, broker: Broker) -> None:
    task = asyncio.ensure_future(client.generate("hi"))
    claim = await claim_one(broker)
    error = RequestError("engine_step_failed", "out of memory", True)
    delta = Delta(index=0, finish_reason=FinishReason.ERROR, error=error)
    await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)])
    with pytest.raises(errors.RequestFailedError, match="out of memory") as caught:
        await task
    assert (caught.value.code, caught.value.retryable) == ("engine_step_failed", True)
    assert await broker.state(claim.request_id) == "failed"


async def test_cancel_through_a_handle_ends_the_stream_as_cancelled(client: Client, broker: Broker) -> None:
    handle = await client.submit("hi")
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    for _ in range(2):
        await handle.cancel()
    output = await handle.result()
    assert (output.text, output.outputs[0].finish_reason) == ("A", "cancelled")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.generate(""), errors.ValidationError, "prompt must not be empty"),
        (lambda c: c.generate([1, -2]), errors.ValidationError, r"prompt\[1\] must be in \[0, 50\), got -2"),
        (lambda c: c.generate([1, 50]), errors.ValidationError, r"prompt\[1\] must be in \[0, 50\), got 50"),
        (lambda c: c.generate([1] * 100), errors.PromptTooLongError, "max_model_len of 'm' is 100"),
        (
            lambda c: c.generate(3),
            errors.ValidationError,
            "prompt must be text, token ids, chat messages or embeddings, got int",
        ),
        (lambda c: c.generate([{"role": "user"}]), errors.ValidationError, r"messages\[0\] must have a 'role'"),
        (lambda c: c.generate("x" * 5_000_000), errors.PayloadTooLargeError, "max_payload_bytes is 4194304"),
        (lambda c: c.generate("x", request_id="a~1"), errors.ValidationError, "request_id must not end in '~' and"),
        (lambda c: c.generate("x", {"n": 1}), errors.ValidationError, "params must be a SamplingParams, got dict"),
        (lambda c: c.generate("x", model="typo"), errors.UnknownModelError, r"'typo' .*known models: m"),
        (lambda c: c.generate("x", request_id="{a}"), errors.ValidationError, "request_id must hold no braces"),
        (lambda c: c.generate("x", cache_salt=""), errors.ValidationError, "cache_salt must be a string of 1 to 512"),
        (lambda c: c.generate("x", session_id=7), errors.ValidationError, "session_id must be a string of 1 to 512"),
        (lambda c: c.generate("x", priority="high"), errors.ValidationError, "priority must be a 32-bit integer"),
        (lambda c: c.generate("x", modle="m"), TypeError, r"unknown argument modle of a request; did you mean model\?"),
        (lambda c: c.cancel("never"), errors.RequestNotFoundError, "'never' of model 'm' is unknown"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_enqueued(client, broker, call, error, message) -> None:
    with pytest.raises(error, match=message):
        await call(client)
    assert (await broker.claim("e0", EngineCapacity(max_num_seqs=1))).claims == []


async def test_an_unknown_or_expired_request_is_reported(redis_url, namespace, broker) -> None:
    async with Client.connect(redis_url, namespace=namespace, result_ttl_s=0.001) as client:
        handle = await client.handle("never")
        with pytest.raises(errors.RequestNotFoundError, match="'never' is unknown"):
            async with asyncio.timeout(DEADLINE_S):
                await handle.result()
        handle = await client.submit("hi", request_id="r")
        await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)
        async with asyncio.timeout(DEADLINE_S):
            while await broker.state("r") is not None:
                await asyncio.sleep(0)
        with pytest.raises(errors.RequestNotFoundError, match="has expired"):
            await handle.result()


async def test_a_client_can_wait_for_a_model_that_was_never_served(redis_url: str, namespace: str) -> None:
    async with Client.connect(redis_url, namespace=namespace) as client:
        with pytest.raises(errors.UnknownModelError, match="no worker has served a model"):
            await client.submit("hi")
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True, model="soon") as client:
        assert (await client.submit("hi")).model == "soon"


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://localhost", errors.ConfigurationError, "must begin with redis://"),
        ("redis://127.0.0.1:1", errors.RedisUnavailableError, "127.0.0.1:1"),
        ("unix:///nowhere.sock", errors.RedisUnavailableError, "nowhere.sock"),
    ],
)
async def test_a_wrong_url_is_reported_in_one_sentence(url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        async with Client.connect(url):
            pass


async def test_an_unconnected_client_raises_a_clear_error(redis_url: str) -> None:
    with pytest.raises(errors.ClientClosedError, match="async with"):
        await Client.connect(redis_url).generate("hi")


async def test_an_error_on_one_channel_ends_only_that_stream(client, broker, commands) -> None:
    healthy, inside = [await client.submit("hi") for _ in range(2)]
    claims = [await claim_one(broker) for _ in range(2)]
    whole = asyncio.ensure_future(healthy.result())
    from_inside = asyncio.ensure_future(anext(inside.stream(after=0)))
    await until_followed(commands, broker, *claims)
    await write(broker, claims[1], 0, 65, 66, text="AB")
    await write(broker, claims[0], 0, 65, end=FinishReason.STOP)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(errors.ValidationError, match="after=0 is inside the delta"):
            await from_inside
        assert (await whole).text == "A"


@pytest.mark.parametrize("call", ["stream", "submit"])
@pytest.mark.parametrize("where", ["messages", "parts", "tools"])
async def test_the_event_loop_runs_while_a_prompt_of_many_parts_is_checked(
    client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch, call: str, where: str
) -> None:
    """The check takes tenths of a second for a body of 4 MB."""
    part, tool = {"type": "text", "text": "a"}, {"type": "function", "function": {"name": "f"}}
    messages = {
        "messages": [{"role": "user", "content": "a"}] * 2000,
        "parts": [{"role": "user", "content": [part] * 2000}],
    }.get(where, [{"role": "user", "content": "a"}])
    kwargs = {"tools": [tool] * 2000} if where == "tools" else None
    loop = asyncio.get_running_loop()

    def held(*args: Any, **options: Any) -> EngineCoreRequest:
        has_turned = threading.Event()
        loop.call_soon_threadsafe(has_turned.set)
        assert has_turned.wait(DEADLINE_S), "the event loop stands still"
        return build_request(*args, **options)

    monkeypatch.setattr("penstock.producer.requests.request_builder.build_request", held)
    asking = getattr(client, call)(messages, SamplingParams(), chat_template_kwargs=kwargs)
    first = asyncio.ensure_future(anext(asking) if call == "stream" else asking)
    claim = await claim_one(broker)
    assert msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest).messages is not None
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    await first
