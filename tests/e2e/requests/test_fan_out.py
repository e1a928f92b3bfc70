"""Several answers to one request, from the real stack with the demo model."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, Client, Delta, SamplingParams
from penstock.shared.errors import UnsupportedParameterError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import derived_seed

pytestmark = pytest.mark.xdist_group("deployment")

PROMPT = "count from four to nine:"
NUM_TOKENS = 120
SEEDED = SamplingParams(n=3, seed=17, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)


async def test_seeded_answers_differ_repeat_and_equal_single_requests(client: Client) -> None:
    first, again = [await client.generate(PROMPT, SEEDED) for _ in range(2)]
    texts = [answer.text for answer in first.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [answer.text for answer in again.outputs] == texts
    singles = [msgspec.structs.replace(SEEDED, n=1, seed=derived_seed(17, child)) for child in range(3)]
    alone = await asyncio.gather(*(client.generate(PROMPT, params) for params in singles))
    assert [one.outputs[0].token_ids for one in alone] == [answer.token_ids for answer in first.outputs]
    assert first.usage is not None
    assert alone[0].usage is not None
    assert (first.usage.num_prompt_tokens, first.usage.num_output_tokens) == (
        alone[0].usage.num_prompt_tokens,
        3 * NUM_TOKENS,
    )


async def test_a_stream_of_three_is_each_answer_without_gap_or_repeat(client: Client) -> None:
    whole = await client.generate(PROMPT, SEEDED)
    deltas: list[Delta] = [delta async for delta in client.stream(PROMPT, SEEDED)]
    for answer in whole.outputs:
        mine = [delta for delta in deltas if delta.child == answer.index]
        assert [d.index + i for d in mine for i in range(len(d.token_ids))] == list(range(NUM_TOKENS))
        assert [t for delta in mine for t in delta.token_ids] == answer.token_ids
        assert "".join(delta.text for delta in mine) == answer.text
        assert [delta.finish_reason for delta in mine if delta.finished] == ["length"]


async def test_greedy_answers_are_equal(client: Client) -> None:
    output = await client.generate(PROMPT, SamplingParams(n=2, temperature=0.0, max_tokens=64))
    assert [answer.text for answer in output.outputs] == [" four five six seven eight nine."] * 2


async def test_a_detached_request_gives_all_answers_to_another_client(deployment: LocalStack) -> None:
    async with Client.connect(deployment.url) as first:
        handle = await first.submit(PROMPT, SEEDED)
        whole = await first.generate(PROMPT, SEEDED)
    async with Client.connect(deployment.url) as second:
        output = await (await second.handle(handle.request_id, n=3)).result()
    assert [answer.text for answer in output.outputs] == [answer.text for answer in whole.outputs]


async def test_each_engine_request_has_one_answer(client: Client) -> None:
    request = EngineCoreRequest(request_id="two-at-once", prompt=PROMPT, sampling_params=SamplingParams(n=2))
    broker = await client._requests.broker("demo").find("two-at-once")
    await broker.enqueue("two-at-once", msgspec.msgpack.encode(request), result_ttl_ms=60_000)
    with pytest.raises(UnsupportedParameterError, match="n=2 is not supported"):
        await (await client.handle("two-at-once")).result()


def test_the_blocking_facade_returns_all_answers(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm:
        outputs = llm.generate(["spell 7:", "spell 12:"], SamplingParams(n=2, temperature=0.0, max_tokens=32))
    assert [[answer.text for answer in output.outputs] for output in outputs] == [[" seven."] * 2, [" twelve."] * 2]
