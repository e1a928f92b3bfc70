"""Prompt embeddings through client, Redis, worker process and engine core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared import errors

from ..conftest import Embeddings

pytestmark = pytest.mark.xdist_group("deployment")

QUESTION = "count from four to nine:"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def embeds(embeddings: Embeddings) -> Any:
    return embeddings(QUESTION)


async def test_embeddings_of_a_text_are_answered_as_the_text(client: Client, embeds: Any) -> None:
    as_text = await client.generate(QUESTION, GREEDY)
    output = await client.generate(embeds, GREEDY)
    assert (output.text, output.outputs[0].token_ids) == (as_text.text, as_text.outputs[0].token_ids)
    assert output.usage is not None
    assert output.usage.num_prompt_tokens == len(embeds)
    several = await client.generate(embeds, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12))
    same = await client.generate(QUESTION, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12))
    assert [answer.token_ids for answer in several.outputs] == [answer.token_ids for answer in same.outputs]


async def test_embeddings_that_cannot_be_served_are_refused_where_it_is_known(
    client: Client, deployment: LocalStack, embeds: Any
) -> None:
    for prompt, message in (
        (embeds[0], r"shape \[prompt tokens, hidden size\]"),
        (embeds.astype(np.float64), "float32, float16, bfloat16, got float64"),
        (embeds.astype(">f4"), "got >f4"),
        (embeds[:0], "neither of them 0"),
        (np.zeros((4, 3), np.float32), "hidden size is"),
        (embeds * np.inf, "must be finite"),
    ):
        with np.errstate(invalid="ignore"), pytest.raises(errors.ValidationError, match=message):
            await client.generate(prompt, GREEDY)
    with pytest.raises(errors.PromptTooLongError, match="3000 tokens"):
        await client.generate(np.zeros((3000, 2), np.float32), GREEDY)
    with pytest.raises(errors.UnsupportedParameterError, match="prompt_logprobs"):
        await client.generate(embeds, SamplingParams(prompt_logprobs=1))
    async with client.converse(GREEDY) as conversation:
        with pytest.raises(errors.UnsupportedParameterError, match="streamed input"):
            await conversation.send(embeds)
    async with Client.connect(deployment.url, max_payload_bytes=1000) as small:
        with pytest.raises(errors.PayloadTooLargeError, match="max_payload_bytes is 1000"):
            await small.generate(embeds, GREEDY)
