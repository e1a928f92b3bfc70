"""Models that pool, by vLLM behind our queue: results as transformers computes them, and refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.ops import demo
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, PoolingParams, SamplingParams, TextPair
from penstock.shared.errors import UnsupportedParameterError, UnsupportedTaskError, ValidationError
from penstock.worker.text.tokenizer import TextCodec

from ..integration.engine.pooling.pooling_models import as_sentence_transformers, make_model

TOKENIZER = Path(demo.__file__).parent / "embedder" / "tokenizer.json"
# Attention of vLLM on a CPU needs heads of 32, of which there are four.
SIZES = {"hidden_size": 128, "vocab_size": 382}
TEXTS = ["four hundred seven", "407", "seventy four thousand and nine", "9"]
OPTIONS = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--enforce-eager"]
OPTIONS += ["--served-model-name", "pooling", "--gpu-memory-utilization", "0.2"]
pytestmark = pytest.mark.slow


class Served:
    """A deployment of a model that pools, and transformers' module of it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.module = make_model(folder, name, **SIZES)
        tokenizer = json.loads(TOKENIZER.read_text())
        tokenizer["post_processor"]["pair"][-1]["Sequence"]["type_id"] = 1  # the second text's tokens are of their own
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.codec = TextCodec.load(folder)
        self.url = ""

    @contextmanager
    def on(self, stack: AbstractContextManager[LocalStack]) -> Iterator[Served]:
        """Start the deployment; stop it at the end."""
        with stack as deployment:
            self.url = deployment.url
            yield self


@pytest.fixture
def embedder(tmp_path: Path, start_vllm: Callable[..., AbstractContextManager[LocalStack]]) -> Iterator[Served]:
    served = Served(tmp_path, "bert")
    as_sentence_transformers(tmp_path, "pooling_mode_mean_tokens", normalize=True, prompts={"query": "seven "})
    with served.on(start_vllm(tmp_path, *OPTIONS)):
        yield served


@pytest.fixture
def classifier(
    request: pytest.FixtureRequest, tmp_path: Path, start_vllm: Callable[..., AbstractContextManager[LocalStack]]
) -> Iterator[Served]:
    """The model that the test names as its parameter."""
    with Served(tmp_path, request.param).on(start_vllm(tmp_path, *OPTIONS, "--runner", "pooling")) as served:
        yield served


async def test_embeddings_are_those_of_transformers(embedder: Served) -> None:
    @torch.no_grad()
    def states_of(text: str) -> torch.Tensor:
        return embedder.module(input_ids=torch.tensor([embedder.codec.encode(text)])).last_hidden_state[0]

    async with Client.connect(embedder.url) as client:
        assert await client.get_supported_tasks() == ("embed", "token_embed")
        pooling = (await client.get_model_config()).pooling
        assert pooling is not None
        assert (pooling.dimensions, pooling.labels) == (SIZES["hidden_size"], ())
        outputs = await client.embed(TEXTS)
        queries = await client.embed(TEXTS, PoolingParams(prompt_name="query"))
        for number, text in enumerate(TEXTS):
            for output, whole in ((outputs[number], text), (queries[number], f"seven {text}")):
                expected = torch.nn.functional.normalize(states_of(whole).mean(0), dim=0)
                assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-5)
        rows = await client.encode(TEXTS[2], PoolingParams(task="token_embed", use_activation=False))
        assert np.array(rows.outputs.data) == pytest.approx(states_of(TEXTS[2]).numpy(), abs=1e-4)
        with pytest.raises(UnsupportedTaskError, match="does not generate; its tasks: embed, token_embed"):
            await client.generate(TEXTS[0], SamplingParams(max_tokens=2))
        with pytest.raises(UnsupportedParameterError, match="does not distinguish the two texts"):
            await client.encode(TextPair(TEXTS[0], TEXTS[1]))
        with pytest.raises(ValidationError, match="does not support Matryoshka"):
            await client.embed(TEXTS[0], PoolingParams(dimensions=8))


@pytest.mark.parametrize("classifier", ["bert, three classes"], indirect=True)
async def test_pairs_are_judged_as_by_transformers(classifier: Served) -> None:
    """The model has other embeddings for tokens of the second text."""
    async with Client.connect(classifier.url) as client:
        pooling = (await client.get_model_config()).pooling
        assert pooling is not None
        assert (pooling.dimensions, pooling.labels) == (0, ("LABEL_0", "LABEL_1", "LABEL_2"))
        for text, other in itertools.pairwise(TEXTS):
            token_ids, second_text_at = classifier.codec.encode_pair(text, other)
            assert second_text_at is not None
            types = [int(place >= second_text_at) for place in range(len(token_ids))]
            with torch.no_grad():
                arguments = {"input_ids": torch.tensor([token_ids]), "token_type_ids": torch.tensor([types])}
                expected = classifier.module(**arguments).logits[0].softmax(0)
            output = await client.encode(TextPair(text, other), PoolingParams(task="classify"))
            assert output.outputs.data == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("classifier", ["bert, classes of tokens"], indirect=True)
async def test_classes_of_tokens_are_those_of_transformers(classifier: Served) -> None:
    async with Client.connect(classifier.url) as client:
        assert await client.get_supported_tasks() == ("token_classify",)
        for text in TEXTS:
            with torch.no_grad():
                logits = classifier.module(input_ids=torch.tensor([classifier.codec.encode(text)])).logits[0]
            output = await client.encode(text, PoolingParams(task="token_classify"))
            assert np.array(output.outputs.data) == pytest.approx(logits.softmax(-1).numpy(), abs=1e-5)
            raw = await client.encode(text, PoolingParams(task="token_classify", use_activation=False))
            assert np.array(raw.outputs.data) == pytest.approx(logits.numpy(), abs=1e-4)
