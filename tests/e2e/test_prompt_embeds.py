"""Prompt embeddings through client, Redis, worker process and engine core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from penstock.ops.demo.run import MODEL
from penstock.ops.local_stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared import errors
from penstock.worker.text.tokenizer import TextCodec

QUESTION = "count from four to nine:"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def enabled() -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--enable-prompt-embeds"]
    with LocalStack(MODEL, options) as stack:
        yield stack


@pytest.fixture
async def allowing(enabled: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(enabled.url) as client:
        yield client


@pytest.fixture(scope="module")
def embeds() -> Any:
    """The model's own embeddings of ``QUESTION``, [tokens, hidden size]."""
    with safe_open(Path(MODEL) / "model.safetensors", "np") as weights:
        (name,) = [name for name in weights.keys() if "embed_tokens" in name]  # noqa: SIM118  # it is no dict
        table = weights.get_tensor(name)
    return table[TextCodec.load(MODEL).encode(QUESTION)]


async def test_embeddings_of_a_text_are_answered_as_the_text(allowing: Client, embeds: Any) -> None:
    as_text = await allowing.generate(QUESTION, GREEDY)
    found = await allowing.generate(embeds, GREEDY)
    assert (found.text, found.outputs[0].token_ids) == (as_text.text, as_text.outputs[0].token_ids)
    assert found.usage is not None
    assert found.usage.num_prompt_tokens == len(embeds)
    several = await allowing.generate(embeds, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12))
    same = await allowing.generate(QUESTION, SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=12))
    assert [answer.token_ids for answer in several.outputs] == [answer.token_ids for answer in same.outputs]


async def test_embeddings_that_cannot_be_served_are_refused_where_it_is_known(
    allowing: Client, enabled: LocalStack, embeds: Any
) -> None:
    for prompt, said in (
        (embeds[0], r"shape \[prompt tokens, hidden size\]"),
        (embeds.astype(np.float64), "float32, float16, bfloat16, got float64"),
        (embeds.astype(">f4"), "got >f4"),
        (embeds[:0], "neither of them 0"),
        (np.zeros((4, 3), np.float32), "hidden size is"),
        (embeds * np.inf, "must be finite"),
    ):
        with np.errstate(invalid="ignore"), pytest.raises(errors.ValidationError, match=said):
            await allowing.generate(prompt, GREEDY)
    with pytest.raises(errors.PromptTooLongError, match="3000 tokens"):
        await allowing.generate(np.zeros((3000, 2), np.float32), GREEDY)
    with pytest.raises(errors.UnsupportedParameterError, match="prompt_logprobs"):
        await allowing.generate(embeds, SamplingParams(prompt_logprobs=1))
    async with allowing.converse(GREEDY) as conversation:
        with pytest.raises(errors.UnsupportedParameterError, match="streamed input"):
            await conversation.send(embeds)
    async with Client.connect(enabled.url, max_payload_bytes=1000) as small:
        with pytest.raises(errors.PayloadTooLargeError, match="max_payload_bytes is 1000"):
            await small.generate(embeds, GREEDY)


@pytest.mark.xdist_group("deployment")
async def test_an_engine_that_was_not_told_to_takes_none(client: Client, embeds: Any) -> None:
    with pytest.raises(errors.UnsupportedParameterError, match="--enable-prompt-embeds"):
        await client.generate(embeds, GREEDY)
