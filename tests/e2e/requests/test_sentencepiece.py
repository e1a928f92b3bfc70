"""A model whose tokenizer is as Llama 2's: a mark begins each word, and a decode strips the first space."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams, StructuredOutputsParams

from ...processes import DEADLINE_S

WORDS = ("the", "capital", "of", "France", "is", "Paris", "Rome", "and", "a", "city")


def llama_tokenizer() -> Tokenizer:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    letters = sorted({letter for word in WORDS for letter in word})
    tokens = ["<unk>", "<s>", "</s>", *bytes_, "▁", *letters]
    merges = []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            merged = "▁" + word[:end]
            if merged not in tokens:
                tokens.append(merged)
                merges.append(("▁" + word[: end - 1], word[end - 1]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return llama_tokenizer()


@pytest.fixture(scope="module")
def deployment(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1"]
    with LocalStack(folder, options) as stack:
        yield stack


@pytest.fixture
async def client(deployment: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(deployment.url) as client:
        yield client


async def test_joined_text_equals_the_decoded_tokens(client: Client, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    words = [vocabulary[token] for token in vocabulary if token.startswith("▁") or token in ("a", "s")]
    params = SamplingParams(temperature=1.0, max_tokens=12, logprobs=0, allowed_token_ids=words)
    prompt = tokenizer.encode("the capital of France is").ids
    num_spaced = 0
    for seed in range(6):
        output = await client.generate("the capital of France is", msgspec.structs.replace(params, seed=seed))
        answer = output.outputs[0]
        assert tokenizer.decode(prompt) + answer.text == tokenizer.decode(prompt + answer.token_ids)
        pieces = [token.texts[0] for token in answer.logprobs or []]
        assert b"".join(pieces).decode() == answer.text
        num_spaced += answer.text.startswith(" ")
    assert num_spaced


async def test_a_choice_is_answered_with_its_space_and_without(client: Client) -> None:
    for choice in (" Paris", "Paris", "  Paris"):
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=[choice])
        )
        assert (await client.generate("the capital of France is", params)).text == choice


async def test_a_stop_string_may_be_the_space_after_the_prompt(client: Client) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=20,
        stop=[" Par"],
        structured_outputs=StructuredOutputsParams(choice=[" Paris"]),
    )
    answer = (await client.generate("the capital of France is", params)).outputs[0]
    assert (answer.text, answer.stop_reason) == ("", " Par")


async def test_each_segment_of_a_conversation_has_the_space_of_its_beginning(
    client: Client, tokenizer: Tokenizer
) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=6, min_tokens=6)
    chunks = ["the capital of France is", "and", "and the city"]

    async def each() -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk

    texts, tokens = [""], list[list[int]]([[]])
    async for delta in client.stream(each(), params):
        texts[-1] += delta.text
        tokens[-1] += delta.token_ids
        if delta.segment_ends:
            texts.append("")
            tokens.append([])
    prompt: list[int] = []
    for number, (chunk, text, token_ids) in enumerate(zip(chunks, texts, tokens, strict=False)):
        prompt += tokenizer.encode(chunk, add_special_tokens=not number).ids
        assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + token_ids)
        prompt += token_ids


def test_an_echo_has_the_space_between_prompt_and_answer(deployment: LocalStack, tmp_path: Path) -> None:
    body = {
        "model": "demo",
        "prompt": "the capital of France is",
        "echo": True,
        "logprobs": 0,
        "max_tokens": 20,
        "seed": 1,
        "structured_outputs": {"choice": [" Paris"]},
    }
    with LocalGateway(deployment.url, [], tmp_path / "gateway.log") as gateway:
        answer = httpx.post(f"{gateway.base_url}/completions", json=body, timeout=DEADLINE_S).json()
    choice = answer["choices"][0]
    assert choice["text"] == "the capital of France is Paris"
    assert "".join(choice["logprobs"]["tokens"]) == f"<s> {choice['text']}</s>"
