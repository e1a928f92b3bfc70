"""Parameters that name tokens or words, and log probabilities of prompts, through the whole stack."""

from __future__ import annotations

import math

import pytest

from penstock.producer import Client, RepetitionDetectionParams, SamplingParams
from penstock.shared.errors import UnsupportedParameterError, ValidationError

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"


async def test_words_tokens_and_biases_are_kept(client: Client) -> None:
    output = (await client.generate(COUNT, SamplingParams(temperature=0.0, max_tokens=64))).outputs[0]
    assert output.text.split()[:3] == ["four", "five", "six"]
    without = await client.generate(COUNT, SamplingParams(temperature=0.0, max_tokens=64, bad_words=["six"]))
    assert "six" not in without.text.split()
    six, nothing_else = output.token_ids[2], output.token_ids[:2]
    biased = SamplingParams(temperature=0.0, max_tokens=64, logit_bias={six: -100.0})
    assert "six" not in (await client.generate(COUNT, biased)).text.split()
    allowed = SamplingParams(max_tokens=9, allowed_token_ids=nothing_else, ignore_eos=True)
    assert set((await client.generate(COUNT, allowed)).outputs[0].token_ids) == set(nothing_else)


async def test_a_repetition_ends_a_request_with_its_reason(client: Client) -> None:
    params = SamplingParams(
        max_tokens=64,
        ignore_eos=True,
        allowed_token_ids=[9],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=5),
    )
    output = (await client.generate(COUNT, params)).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")
    assert output.token_ids == [9] * 5


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (SamplingParams(allowed_token_ids=[10**6]), ValidationError, "allowed_token_ids holds 1000000, but"),
        (SamplingParams(thinking_token_budget=3), UnsupportedParameterError, "thinking_token_budget=3 needs a model"),
        (SamplingParams(bad_words_token_ids=[[3]]), ValidationError, "bad_words_token_ids is set by the worker"),
    ],
    ids=["vocabulary", "thinking", "field"],
)
async def test_a_mistake_reaches_its_caller(
    client: Client, params: SamplingParams, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await client.generate(COUNT, params)


async def test_prompt_logprobs_arrive_once_with_the_first_token(client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=2, seed=5, prompt_logprobs=2)
    deltas = [delta async for delta in client.stream(COUNT, params)]
    telling = [delta for delta in deltas if delta.prompt_logprobs]
    assert [(delta.child, delta.index) for delta in telling] == [(0, 0)]
    handle = await client.submit(COUNT, SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=2))
    output = await handle.result()
    logprobs = output.prompt_logprobs
    assert output.usage is not None
    assert logprobs is not None
    assert len(logprobs) == output.usage.num_prompt_tokens
    assert logprobs[0] is None
    for token, again in zip(logprobs[1:], telling[0].prompt_logprobs, strict=True):
        assert token is not None
        assert token.token_id == again.token_id
        assert math.isclose(token.logprob, again.logprob, abs_tol=1e-4)
        assert len(token.top) == 2
        assert (token.rank <= 2) == (token.token_id in [token_id for token_id, _ in token.top])
    parts = [delta async for delta in handle.stream()]
    rest = [delta async for delta in handle.stream(after=parts[0].next_index - 1)]
    assert all(delta.prompt_logprobs == [] for delta in rest)
    assert (await client.generate(COUNT, SamplingParams(max_tokens=1))).prompt_logprobs is None
