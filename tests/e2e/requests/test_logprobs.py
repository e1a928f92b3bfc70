"""Penalties and log probabilities through the whole stack, with the demo model."""

from __future__ import annotations

import asyncio
import math

import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.messages.deltas import Delta

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."


def assert_one_per_token(delta: Delta, num_top: int) -> None:
    assert [token.token_id for token in delta.logprobs] == delta.token_ids
    for token in delta.logprobs:
        assert token.logprob <= 0
        values = [logprob for _, logprob in token.top]
        assert len(values) == num_top
        assert values == sorted(values, reverse=True)
        if token.rank <= num_top:
            assert values[token.rank - 1] == token.logprob


async def test_a_stream_has_logprobs_for_every_token(client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=3)
    deltas = [delta async for delta in client.stream(COUNT, params)]
    for delta in deltas:
        assert_one_per_token(delta, 3)
        assert all(token.rank == 1 and token.top[0] == (token.token_id, token.logprob) for token in delta.logprobs)
    assert "".join(delta.text for delta in deltas) == COUNTED

    handle = await client.submit(COUNT, params)
    whole = (await handle.result()).outputs[0]
    streamed = [token for delta in deltas for token in delta.logprobs]
    assert whole.logprobs is not None
    assert [token.token_id for token in whole.logprobs] == whole.token_ids == [token.token_id for token in streamed]
    assert [token.logprob for token in whole.logprobs] == pytest.approx([t.logprob for t in streamed], abs=1e-4)
    assert whole.cumulative_logprob == pytest.approx(sum(token.logprob for token in whole.logprobs))
    # From the log, from the middle on.
    parts = [delta async for delta in handle.stream()]
    middle = parts[0].next_index - 1
    rest = [token for delta in [d async for d in handle.stream(after=middle)] for token in delta.logprobs]
    assert rest == whole.logprobs[middle + 1 :]


async def test_requests_without_logprobs_get_none(client: Client) -> None:
    asks = client.generate(COUNT, SamplingParams(temperature=0.0, max_tokens=64, logprobs=0))
    does_not = client.generate(COUNT, SamplingParams(temperature=0.0, max_tokens=64))
    asking, other = (output.outputs[0] for output in await asyncio.gather(asks, does_not))
    assert asking.token_ids == other.token_ids
    assert asking.logprobs is not None
    assert all(token.top == [] for token in asking.logprobs)
    assert (other.logprobs, other.cumulative_logprob) == (None, None)


async def test_penalties_change_the_choice_and_not_the_logprobs(client: Client) -> None:
    fixed = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 20}
    repeated = (await client.generate("spell 7:", SamplingParams(**fixed))).outputs[0]
    penalised = SamplingParams(**fixed, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5)
    deltas = [delta async for delta in client.stream("spell 7:", penalised)]
    for delta in deltas:
        assert_one_per_token(delta, 20)
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert len(tokens) == 24
    assert len({token.token_id for token in tokens}) > len(set(repeated.token_ids))
    assert max(token.rank for token in tokens) > 1
    assert all(math.isfinite(token.logprob) for token in tokens)
