"""Requests whose prompt grows, from the real stack with the demo model, against plain requests of the same tokens."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, Delta, SamplingParams, StreamingInput, StructuredOutputsParams
from penstock.shared import errors
from penstock.shared.messages.requests import InputChunk
from penstock.shared.params.sampling import derived_seed
from penstock.worker.text.tokenizer import TextCodec

from ..processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=1.2, seed=9, max_tokens=22, min_tokens=5, presence_penalty=0.4, logprobs=1)
QUESTIONS = ["count from four to nine:", " spell 407:", " four plus two is", " count from two to nine:"]
CHUNKS = [TextCodec.load(MODEL).encode_chunk(question) for question in QUESTIONS]


async def each(*chunks: Any) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


def segments(deltas: Sequence[Delta]) -> list[list[int]]:
    """Return the output tokens of each segment, and check the rules of every such stream."""
    assert [delta.index for delta in deltas[1:]] == [delta.next_index for delta in deltas[:-1]]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    ends = [end for delta in deltas for end in delta.segment_ends]
    assert [end.number for end in ends] == list(range(len(ends)))
    tokens = [token_id for delta in deltas for token_id in delta.token_ids]
    bounds = [0, *(end.next_index for end in ends)]
    assert bounds[-1] == len(tokens)
    return [tokens[start:end] for start, end in itertools.pairwise(bounds)]


def seeded(params: SamplingParams, number: int) -> SamplingParams:
    """``params`` as the answer to chunk ``number`` has them, if they are the conversation's."""
    seed = None if params.seed is None else derived_seed(params.seed, number)
    return msgspec.structs.replace(params, seed=seed)


async def one_by_one(
    client: Client, params: SamplingParams, chunks: list[list[int]], own: dict[int, SamplingParams] | None = None
) -> list[list[int]]:
    """Return the answers of plain requests, each with the whole conversation as its prompt; some have parameters of
    their own.
    """
    prompt: list[int] = []
    answers = []
    for number, chunk in enumerate(chunks):
        output = await client.generate([*prompt, *chunk], (own or {}).get(number) or seeded(params, number))
        answers.append(output.outputs[0].token_ids)
        prompt += [*chunk, *answers[-1]]
    return answers


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_each_chunk_is_answered_as_a_plain_request_of_all_before_it(
    client: Client, params: SamplingParams
) -> None:
    deltas = [delta async for delta in client.stream(each(*CHUNKS), params)]
    answers = await one_by_one(client, params, CHUNKS)
    assert segments(deltas) == answers
    assert len({token_id for answer in answers for token_id in answer}) > 5
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (sum(map(len, CHUNKS)), sum(map(len, answers)))
    assert usage.num_cached_tokens >= 16, "the last segment has its first full block from the one before"
    assert sum(len(delta.logprobs) for delta in deltas) == (usage.num_output_tokens if params is SEEDED else 0)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("numbers", [(0,), (1, 3), (0, 2)], ids=str)
async def test_a_chunk_with_its_own_parameters_is_answered_with_them(
    client: Client, params: SamplingParams, numbers: tuple[int, ...]
) -> None:
    """The others are answered with the conversation's, the chunks after a first one that had its own included."""
    own = {n: SamplingParams(temperature=0.8, seed=40 + n, max_tokens=9 + n, ignore_eos=True) for n in numbers}
    chunks = [StreamingInput(chunk, own.get(number)) for number, chunk in enumerate(CHUNKS)]
    deltas = [delta async for delta in client.stream(each(*chunks), params)]
    assert segments(deltas) == await one_by_one(client, params, CHUNKS, own)
    assert [len(segments(deltas)[n]) for n in numbers] == [9 + n for n in numbers]


async def test_a_chunk_without_a_seed_has_the_randomness_of_the_conversation(client: Client) -> None:
    own = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    deltas = [delta async for delta in client.stream(each(CHUNKS[0], StreamingInput(CHUNKS[1], own)), SEEDED)]
    reference = await one_by_one(client, SEEDED, CHUNKS[:2], {1: seeded(msgspec.structs.replace(own, seed=9), 1)})
    assert segments(deltas) == reference


async def test_a_chunk_may_bring_its_own_grammar_and_stop_strings(client: Client) -> None:
    grammar = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    stopped = SamplingParams(temperature=0, max_tokens=40, stop=["seven"])
    async with client.converse(GREEDY) as conversation:
        await conversation.send("is it?", grammar)
        await conversation.send(StreamingInput("count from four to nine:", stopped))
        await conversation.close_input()
        answers = [[delta async for delta in conversation.segment()] for _ in range(2)]
    assert "".join(delta.text for delta in answers[0]) in ("yes", "no")
    assert answers[1][-1].segment_ends[0].stop_reason == "seven"


async def test_text_is_that_of_a_plain_request_and_stop_strings_end_a_segment(client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["seven"])
    async with client.converse(params) as conversation:
        texts, reasons = [], []
        for chunk in ("count from four to nine:", " spell 12:"):
            await conversation.send(chunk)
            deltas = [delta async for delta in conversation.segment()]
            texts.append("".join(delta.text for delta in deltas))
            reasons.append(deltas[-1].segment_ends[0].stop_reason)
        await conversation.close_input()
        rest = [delta async for delta in conversation]
    assert texts[0] == " four five six "
    assert reasons[0] == "seven"
    assert [(delta.token_ids, delta.finished) for delta in rest] == [([], True)]


async def test_chunks_sent_ahead_wait_for_the_segments_before_them(client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    async with client.converse(params) as conversation:
        for chunk in CHUNKS:
            await conversation.send(chunk)
        await conversation.close_input()
        deltas = [delta async for delta in conversation]
    assert segments(deltas) == await one_by_one(client, params, CHUNKS)


async def test_many_conversations_during_plain_requests(client: Client) -> None:
    """Their segments run in one batch with each other and with other requests, and none sees another's."""
    all_chunks = [[[30 + i, 40 + j, 50 + i + j] * 3 for j in range(3)] for i in range(8)]
    plain = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)

    async def converse(chunks: list[list[int]]) -> list[list[int]]:
        return segments([delta async for delta in client.stream(each(*chunks), SEEDED)])

    crowd = [client.generate("spell 12:", plain) for _ in range(20)]
    conversations, _ = await asyncio.gather(asyncio.gather(*map(converse, all_chunks)), asyncio.gather(*crowd))
    assert conversations == [await one_by_one(client, SEEDED, chunks) for chunks in all_chunks]


async def test_a_chunk_that_fills_the_context_ends_the_request_and_keeps_its_output(client: Client) -> None:
    deltas: list[Delta] = []

    async def read() -> None:
        async for delta in client.stream(each([40] * 40, [41] * 2010), GREEDY, request_id="long"):
            deltas.append(delta)  # noqa: PERF401  # what came before the error is wanted

    with pytest.raises(errors.PromptTooLongError, match=r"with chunk 1 of its input .* max_model_len is 2048"):
        await read()
    assert deltas[-1].segment_finish_reason == "stop"
    assert (await client.status("long")).num_output_tokens == deltas[-1].next_index


@pytest.mark.parametrize(
    ("chunk", "message"),
    [(InputChunk(), "chunk 1 .* neither"), (InputChunk(prompt_token_ids=[10**6]), "holds 1000000")],
)
async def test_a_chunk_that_only_the_engine_finds_wrong_ends_the_request(
    client: Client, chunk: InputChunk, message: str
) -> None:
    async with client.converse(GREEDY) as conversation:
        await conversation.send(CHUNKS[0])
        assert conversation.request_id is not None
        answer = [delta async for delta in conversation.segment()]
        extend = (await client._requests.broker("demo").find(conversation.request_id)).input.extend
        await extend(conversation.request_id, 1, chunk)
        with pytest.raises(errors.ValidationError, match=message):
            await anext(conversation)
        with pytest.raises(errors.InputClosedError, match="has ended"):
            await extend(conversation.request_id, 2, InputChunk(prompt="more"))
    assert answer[-1].segment_finish_reason == "stop"


async def test_structured_output_holds_in_every_segment(client: Client) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    deltas = [delta async for delta in client.stream(each("is it?", " and now?"), params)]
    assert len(segments(deltas)) == 2
    texts = "".join(delta.text + "|" * bool(delta.segment_ends) for delta in deltas)
    assert set(texts.strip("|").split("|")) <= {"yes", "no"}


@pytest.mark.parametrize("before_first", [True, False])
async def test_an_exception_of_the_iterator_cancels_the_request(client: Client, before_first: bool) -> None:
    async def broken() -> AsyncIterator[str]:
        if not before_first:
            yield "spell 12:"
        raise LookupError("the microphone is gone")

    request_id = f"broken-{before_first}"
    with pytest.raises(LookupError, match="microphone"):
        async for _ in client.stream(broken(), SamplingParams(max_tokens=500), request_id=request_id):
            pass
    status = await client.status(request_id) if not before_first else None
    assert status is None or status.state == "cancelled"


async def test_a_request_waits_for_input_without_an_engine_and_expires(client: Client) -> None:
    for timeout_s in (1.0, 5.0, 60.0):  # the shortest that this machine needs for a segment
        request_id = f"idle-{timeout_s}"
        async with client.converse(GREEDY, timeout_s=timeout_s, request_id=request_id) as conversation:
            await conversation.send(CHUNKS[0])
            answer = [delta async for delta in conversation.segment()]
            state = (await client.status(request_id)).state
            if answer[-1].finished or state == "expired":
                continue  # the segment itself was late
            assert state == "awaiting_input"
            rest = [delta async for delta in conversation]
            break
    assert answer[-1].segment_finish_reason == "stop"
    assert [delta.finish_reason for delta in rest] == ["expired"]
    with pytest.raises(errors.ClientClosedError, match="was left"):
        await conversation.send("more")


async def test_leaving_a_conversation_cancels_it(deployment: LocalStack) -> None:
    async with Client.connect(deployment.url) as client:
        async with client.converse(GREEDY, request_id="left") as conversation:
            await conversation.send(CHUNKS[0])
            async for _ in conversation.segment():
                pass
        assert (await client.status("left")).state == "cancelled"


CLIENT = """
import asyncio, sys
from penstock.producer import Client, SamplingParams

async def main():
    async with Client.connect(sys.argv[1], lease_ttl_s=1.0) as client:
        async with client.converse(SamplingParams(max_tokens=4), request_id="orphan") as conversation:
            await conversation.send("spell 12:")
            async for delta in conversation.segment():
                pass
            print("waiting", flush=True)
            await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_conversation_ends_when_its_client_is_killed_between_chunks(deployment: LocalStack) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, deployment.url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"waiting\n"
    process.kill()
    await process.wait()
    async with Client.connect(deployment.url) as client, asyncio.timeout(DEADLINE_S):
        while (await client.status("orphan")).state != "cancelled":
            await asyncio.sleep(0.05)
