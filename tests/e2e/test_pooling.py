"""A model that pools through client, Redis, worker process and engine core, and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock.ops.local_server import LocalGateway
from penstock.ops.local_stack import LocalStack
from penstock.producer import Client, PoolingParams
from penstock.shared.broker import Broker
from penstock.shared.keys import Keys

TEXTS = [f"w{i % 40} w{i // 40} w{i % 7}" for i in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with words for tokens, in a folder of sentence-transformers."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "find", *(f"w{i}" for i in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.3, **sizes)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"path": f"{i}_{kind}" if i else "", "type": f"models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find "}}')
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--threads", "1", "--served-model-name", "bert", "--max-num-seqs", "16"]
    with LocalStack(folder, options) as stack:
        yield stack


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(stack.url) as client:
        yield client


async def test_many_texts_in_one_call_are_embedded_each_as_alone(client: Client) -> None:
    outputs = await client.embed(TEXTS)
    alone = await client.encode(TEXTS[217])
    assert [output.prompt for output in outputs] == TEXTS
    assert outputs[217].outputs.embedding == pytest.approx(alone.outputs.vector, abs=1e-5)
    assert sum(x * x for x in alone.outputs.vector) == pytest.approx(1, abs=1e-5)
    assert alone.usage is not None
    assert (alone.usage.num_prompt_tokens, alone.usage.num_output_tokens) == (5, 0)
    (asked, told) = await client.embed(["w1"], PoolingParams(prompt_name="query")), await client.embed("find w1")
    assert asked[0].outputs.embedding == pytest.approx(told[0].outputs.embedding, abs=1e-5)
    card = await client.get_model_config()
    assert card.supported_tasks == ("embed", "token_embed")
    (same, other) = await client.score("w1 w2", ["w1 w2", "w30"])
    assert same.outputs.score == pytest.approx(1, abs=1e-5)
    assert other.outputs.score < 0.99


async def test_what_an_engine_held_when_it_was_killed_is_pooled_once(client: Client, stack: LocalStack) -> None:
    expected = {text: output.outputs.embedding for text, output in zip(TEXTS, await client.embed(TEXTS), strict=True)}
    (before,) = await client.engines()
    # It claims, and then gives nothing.
    os.kill(before.core_pid, signal.SIGSTOP)
    handles = await client.submit_many(TEXTS, PoolingParams(task="embed"))
    async with asyncio.timeout(60):
        while (await client.queue_stats()).num_running < 16:
            await asyncio.sleep(0.02)
    os.kill(before.core_pid, signal.SIGKILL)
    results = await asyncio.gather(*(handle.result() for handle in handles))
    broker = Broker(client._commands, Keys().model("bert"))
    for text, handle, result in zip(TEXTS, handles, results, strict=True):
        assert result.pooled is not None
        assert result.pooled.vector == pytest.approx(expected[text], abs=1e-5)
        assert len(await broker.read_log(handle.request_id)) == 1
    attempts = [result.outputs[0].stats.num_deliveries for result in results if result.outputs[0].stats is not None]
    assert len(attempts) == len(TEXTS)
    assert sum(attempts) > len(TEXTS)


async def test_a_known_request_id_gives_the_stored_result(client: Client) -> None:
    first, again = [await client.encode_all(TEXTS[:3], request_id="known") for _ in range(2)]
    assert [output.request_id for output in first] == ["known-0", "known-1", "known-2"]
    assert [output.pooled for output in first] == [output.pooled for output in again]


def test_the_gateway_answers_as_openai_jina_and_vllm_do(stack: LocalStack, tmp_path: Path) -> None:
    with LocalGateway(stack.url, [], tmp_path / "gateway.log") as gateway:
        sdk = openai.OpenAI(base_url=gateway.base_url, api_key="-", max_retries=0)
        answer = sdk.embeddings.create(model="bert", input=["w1 w2", "w3"])  # base64 on the wire
        floats = sdk.embeddings.create(model="bert", input=[[2, 6, 7, 3], [2, 8, 3]], encoding_format="float")
        for one, other in zip(answer.data, floats.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7
        assert len(sdk.embeddings.create(model="bert", input="w1", dimensions=8).data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.embeddings.create(model="bert", input="w1", dimensions=99)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError, match="does not generate; its tasks: embed, token_embed"):
            sdk.completions.create(model="bert", prompt="w1")
        http = httpx.Client(base_url=gateway.base_url.removesuffix("/v1"))
        documents = ["w20 w21", "w1 w2", "w3"]
        ranked = http.post("/rerank", json={"query": "w1 w2", "documents": documents, "top_n": 2}).json()
        assert (ranked["results"][0]["index"], ranked["results"][0]["document"]) == (1, {"text": "w1 w2"})
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-5)
        assert len(ranked["results"]) == 2
        scores = http.post("/v1/score", json={"text_1": "w1 w2", "text_2": documents}).json()["data"]
        assert scores[1]["score"] == pytest.approx(1, abs=1e-5)
        tokens = http.post("/pooling", json={"input": "w1 w2", "task": "token_embed", "encoding_format": "base64"})
        data = base64.b64decode(tokens.json()["data"][0]["data"])
        assert len(struct.unpack(f"<{len(data) // 4}f", data)) == 4 * 32
        refused = http.post("/classify", json={"input": "w1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
