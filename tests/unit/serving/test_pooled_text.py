"""The beginning of a pooled text, and the tokens of pairs."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.shared.errors import ValidationError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams, PoolingSetup
from penstock.worker.serving.requests.intake import PooledText
from penstock.worker.text.thread import TextThread
from penstock.worker.text.tokenizer import TextCodec


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3, "find": 4}, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return TextCodec(tokenizer, None)


def request(prompt: str | None, pair: str | None = None, name: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r", prompt=prompt, text_pair=pair, pooling_params=PoolingParams(prompt_name=name)
    )


async def test_a_text_begins_with_the_prompt_that_is_named_or_the_models_own(codec: TextCodec) -> None:
    text = PooledText(
        codec,
        PoolingSetup(prompts={"query": "find ", "document": "a "}, default_prompt_name="document"),
        TextThread("text"),
    )
    named, unnamed = request("b", name="query"), request("b")
    await text.complete(named)
    await text.complete(unnamed)
    assert (named.prompt, unnamed.prompt) == ("find b", "a b")
    with pytest.raises(ValidationError, match="prompt_name must be one of document, query, got 'other'"):
        await text.complete(request("b", name="other"))
    with pytest.raises(ValidationError, match="prompt_name='query' requires a text prompt"):
        await text.complete(request(None, name="query"))


@pytest.mark.parametrize("num_words", [1, 3000])
async def test_the_second_text_of_a_pair_has_another_type(codec: TextCodec, num_words: int) -> None:
    pair = request("a " * num_words, "b")
    await PooledText(codec, None, TextThread("text")).complete(pair)
    assert pair.prompt_token_ids == [0, *[2] * num_words, 1, 3, 1]
    assert (pair.second_text_at, pair.prompt, pair.text_pair) == (num_words + 2, None, None)
