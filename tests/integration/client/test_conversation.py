"""Streamed input as the client sees it, with the engine played by the test through the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from penstock.producer import Client, Delta, RequestOutputKind, SamplingParams, StreamingInput
from penstock.shared import errors
from penstock.shared.broker import Broker, Claim, SegmentRecord
from penstock.shared.messages.deltas import SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import EngineCoreRequest, InputChunk
from penstock.shared.params.sampling import derived_seed
from penstock.shared.queue.policy import QueuePolicy

from .harness import claim_one, until, write

PARAMS = SamplingParams(max_tokens=7)


async def end_segment(broker: Broker, claim: Claim, number: int, index: int, *tokens: int) -> None:
    end = SegmentEnd(number, index + len(tokens), FinishReason.LENGTH)
    delta = Delta(index=index, token_ids=list(tokens), text="".join(map(chr, tokens)), segment_ends=[end])
    delta.usage = Usage(num_prompt_tokens=10, num_output_tokens=delta.next_index)
    assert await broker.end_segments([SegmentRecord(claim.request_id, claim.epoch, delta)]) == []


async def texts(broker: Broker, request_id: str) -> list[str | None]:
    return [msgspec.msgpack.decode(chunk, type=InputChunk).prompt for chunk in await broker.input.read(request_id)]


async def chunks(*given: str) -> AsyncIterator[str]:
    for chunk in given:
        yield chunk


async def test_the_first_chunk_enqueues_and_the_others_extend(client: Client, broker: Broker, commands) -> None:
    async with client.converse(PARAMS, request_id="r", tenant="acme") as conversation:
        assert conversation.request_id is None
        await conversation.send("one")
        assert conversation.request_id == "r"
        await conversation.send([5, 6])
        claim = await claim_one(broker)
        request = msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)
        assert (request.resumable, request.prompt, request.tenant) == (True, "one", "acme")
        await conversation.send("three")
        sent = [msgspec.msgpack.decode(data, type=InputChunk) for data in await broker.input.read("r")]
        assert sent == [InputChunk(prompt_token_ids=[5, 6]), InputChunk(prompt="three")]
        await conversation.close_input()
        counts = await commands.execute("HMGET", broker.keys.request("r"), "prompt", "max")
        assert counts == [b"5", b"21"]
        for number in range(3):
            await end_segment(broker, claim, number, number, 65 + number)
            if number < 2:
                claim = await claim_one(broker)
        deltas = [delta async for delta in conversation]
    assert [(delta.text, delta.segment_finish_reason) for delta in deltas[:-1]] == [(c, "length") for c in "ABC"]
    assert (deltas[-1].finish_reason, deltas[-1].usage) == ("length", Usage(10, 3))


async def test_a_chunk_may_have_its_own_parameters(client: Client, broker: Broker, commands) -> None:
    """The first chunk has its own parameters and the others the conversation's; the request has those of the first."""
    own = [SamplingParams(max_tokens=3), None, SamplingParams(max_tokens=5, seed=4)]
    async with client.converse(SamplingParams(max_tokens=7, seed=2), request_id="r") as conversation:
        for number, params in enumerate(own):
            await conversation.send(StreamingInput([number + 1], params))
        await conversation.send("four")
        request = msgspec.msgpack.decode((await claim_one(broker)).payload, type=EngineCoreRequest)
        sent = [msgspec.msgpack.decode(data, type=InputChunk) for data in await broker.input.read("r")]
        tokens = await commands.execute("HGET", broker.keys.request("r"), "max")
        with pytest.raises(errors.ValidationError, match="not both"):
            await conversation.send(StreamingInput("five", own[0]), own[0])
        with pytest.raises(errors.ValidationError, match="must be a SamplingParams, got dict"):
            await conversation.send("five", {"max_tokens": 4})  # type: ignore[arg-type]  # the mistake
        with pytest.raises(errors.UnsupportedParameterError, match="n=2"):
            await conversation.send("five", SamplingParams(n=2))
        assert len(await broker.input.read("r")) == 3, "what was refused was not added"
    assert request.sampling_params is not None
    assert (request.sampling_params.max_tokens, tokens) == (3, b"22")
    of_conversation = [SamplingParams(max_tokens=7, seed=derived_seed(2, number)) for number in (1, 3)]
    assert [chunk.sampling_params for chunk in sent] == [of_conversation[0], own[2], of_conversation[1]]


async def test_a_slow_reader_gets_each_segment_separately(client: Client, broker: Broker) -> None:
    """Pending deltas are merged, but the end of a segment ends a delta."""
    async with client.converse(PARAMS) as conversation:
        await conversation.send("one")
        await conversation.send("two")
        claim = await claim_one(broker)
        await write(broker, claim, 0, 65)
        await write(broker, claim, 1, 66)
        await end_segment(broker, claim, 0, 2)
        claim = await claim_one(broker)
        await write(broker, claim, 2, 67)
        await end_segment(broker, claim, 1, 3, 68)
        first = [delta async for delta in conversation.segment()]
        second = [delta async for delta in conversation.segment()]
        await conversation.close_input()
        rest = [delta async for delta in conversation]
    assert "".join(delta.text for delta in first) == "AB"
    assert "".join(delta.text for delta in second) == "CD"
    assert [delta.segment_ends for delta in first if delta.segment_ends] == [[SegmentEnd(0, 2, FinishReason.LENGTH)]]
    assert [delta.finished for delta in rest] == [True]


async def test_cumulative_output_keeps_the_ends_of_all_segments(client: Client, broker: Broker) -> None:
    params = SamplingParams(max_tokens=7, output_kind=RequestOutputKind.CUMULATIVE)
    stream = client.stream(chunks("one", "two"), params)
    reading = asyncio.ensure_future(anext(stream))
    claim = await claim_one(broker)
    await end_segment(broker, claim, 0, 0, 65)
    assert (await reading).text == "A"
    await end_segment(broker, await claim_one(broker), 1, 1, 66)
    *_, last = [delta async for delta in stream]
    assert (last.text, last.finished) == ("AB", True)
    assert [end.next_index for end in last.segment_ends] == [1, 2]


async def test_a_repeated_stream_call_adds_no_input_and_gets_all_output(client, broker, redis_url, namespace):
    stream = client.stream(chunks("one", "two"), PARAMS, request_id="r")
    reading = asyncio.ensure_future(anext(stream))
    await end_segment(broker, await claim_one(broker), 0, 0, 65)
    await reading
    await end_segment(broker, await claim_one(broker), 1, 1, 66)
    rest = [delta async for delta in stream]
    async with Client.connect(redis_url, namespace=namespace) as other:
        again = [delta async for delta in other.stream(chunks("one", "two"), PARAMS, request_id="r")]
        assert "".join(delta.text for delta in again) == "AB"
        assert again[-1].finish_reason == rest[-1].finish_reason == "length"
        async with other.converse(PARAMS, request_id="r") as conversation:
            await conversation.send("one")
            with pytest.raises(errors.ValidationError, match="has another chunk 1"):
                await conversation.send("else")
    assert await texts(broker, "r") == ["two"]
    handle = await client.handle("r")
    assert [delta.text async for delta in handle.stream(after=0) if delta.token_ids] == ["B"]
    assert (await handle.result()).text == "AB"


async def test_a_refused_first_chunk_may_be_sent_again(client: Client, broker: Broker) -> None:
    await client.configure_queue(QueuePolicy(max_queue_depth=1))
    before = await client.submit("first in line")
    async with client.converse(PARAMS) as conversation:
        with pytest.raises(errors.QueueFullError):
            await conversation.send("one")
        with pytest.raises(errors.ValidationError, match="at least one chunk"):
            await conversation.close_input()
        await before.cancel()
        await conversation.send("one")
        await end_segment(broker, await claim_one(broker), 0, 0, 65)
        assert [delta.text async for delta in conversation.segment()] == ["A"]


async def test_a_cancelled_read_loses_nothing(client: Client, broker: Broker) -> None:
    async with client.converse(PARAMS) as conversation:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(conversation), 0.01)
        await conversation.send("one")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(conversation), 0.01)
        await end_segment(broker, await claim_one(broker), 0, 0, 65)
        assert (await anext(conversation)).text == "A"


async def test_sending_to_an_ended_request_raises_a_clear_error(client: Client, broker: Broker) -> None:
    async with client.converse(PARAMS, request_id="r") as conversation:
        await conversation.send("one")
        await write(broker, await claim_one(broker), 0, 65, end=FinishReason.STOP)
        with pytest.raises(errors.InputClosedError, match=r"has ended \(finished\)"):
            await conversation.send("two")
        assert [delta.finish_reason async for delta in conversation] == ["stop"]


@pytest.mark.parametrize("chunk", ["", [], 7, b"bytes", [1, "x"], [99], [[1]]])
async def test_a_wrong_chunk_is_refused_and_the_conversation_continues(client, broker, chunk) -> None:
    async with client.converse(PARAMS, request_id="r") as conversation:
        await conversation.send("one")
        with pytest.raises(errors.ValidationError):
            await conversation.send(chunk)
        await conversation.send("two")
        assert await texts(broker, "r") == ["two"]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("n=2", SamplingParams(n=2)),
        ("prompt_logprobs=1", SamplingParams(prompt_logprobs=1)),
        ("output_kind", SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)),
    ],
)
async def test_parameters_that_make_no_sense_are_refused_by_name(client: Client, name: str, params) -> None:
    with pytest.raises(errors.UnsupportedParameterError, match=name):
        client.converse(params)
    with pytest.raises(errors.UnsupportedParameterError, match=name):
        await anext(client.stream(chunks("one"), params))


async def test_an_iterator_that_gives_nothing_is_a_mistake(client: Client) -> None:
    with pytest.raises(errors.ValidationError, match="at least one"):
        await anext(client.stream(chunks(), PARAMS))


async def test_leaving_the_stream_stops_the_iterator_and_cancels_the_request(client: Client, broker: Broker) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            yield "one"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def read_one() -> None:
        async for _ in client.stream(endless(), PARAMS, request_id="r"):
            break

    reading = asyncio.ensure_future(read_one())
    await end_segment(broker, await claim_one(broker), 0, 0, 65)
    await reading

    async def is_cancelled() -> bool:
        return closed.is_set() and await broker.state("r") == "cancelled"

    await until(is_cancelled)


def test_merged_deltas_keep_the_ends_of_their_segments() -> None:
    first = Delta(index=0, token_ids=[1], text="a", segment_ends=[SegmentEnd(0, 1, FinishReason.STOP, 7)])
    second = Delta(index=1, token_ids=[2], text="b", segment_ends=[SegmentEnd(1, 2, FinishReason.LENGTH)])
    whole = first.followed_by(second)
    assert [end.number for end in whole.segment_ends] == [0, 1]
    assert whole.segment_finish_reason == "length"
    assert first.followed_by(Delta(index=1, token_ids=[3])).segment_finish_reason == "stop"
