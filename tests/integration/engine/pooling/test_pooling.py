"""Prompts that are pooled give what transformers makes of each alone, however they are cut up and mixed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from penstock.kernels import native
from penstock.shared.control.engine import Sleep, WakeUp
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.outcome import FinishReason
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine

from ..adapters.peft_folders import Kind, lora_request, merge, write_adapter
from ..harness import ask
from .pooling_models import MODELS, VOCAB_SIZE, array_of, as_sentence_transformers, cosine, make_model, pool, request

Make = Callable[..., Engine]
# Longer than a step's budget, which is 32: a decoder has them in chunks, an encoder whole.
LENS = (5, 1, 17, 40, 9, 25, 60, 3)
_LAYERS = r".*layers?\.\d+\..*"
PROMPTS = [np.random.default_rng(n).integers(5, VOCAB_SIZE, n).tolist() for n in LENS]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(**options: Any) -> Engine:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_memory": 1 << 18, "num_threads": 1}
        return build_engine(EngineConfig(model=str(tmp_path), **{**sizes, **options}), tmp_path)

    return make


@torch.no_grad()
def _pooled(module: PreTrainedModel, task: str, prompt: list[int], token: int) -> NDArray[np.float32]:
    """Return transformers' own result: the hidden state of ``token``, or the logits of a classifier."""
    token_ids = torch.tensor([prompt])
    if task == "embed":
        return module.base_model(input_ids=token_ids).last_hidden_state[0, token].numpy()
    return module(input_ids=token_ids).logits[0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_pooled_results_in_a_batch_equal_those_of_transformers(name: str, tmp_path: Path, make: Make) -> None:
    module = make_model(tmp_path, name)
    engine = make(runner="pooling")
    task = engine.ready.supported_tasks[0]
    ended = pool(
        engine.core, [request(str(i), prompt, task=task, use_activation=False) for i, prompt in enumerate(PROMPTS)]
    )
    is_decoder = name.startswith(("qwen", "llama", "gemma"))
    # By transformers' own code where no plan says how it is made.
    assert engine.ready.attention_backend == ("torch" if name.startswith("albert") else "native")
    for i, prompt in enumerate(PROMPTS):
        ours, theirs = array_of(ended[str(i)]), _pooled(module, task, prompt, -1 if is_decoder else 0)
        assert ours.shape == theirs.shape
        assert cosine(ours, theirs) >= 1 - 1e-6
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        assert ended[str(i)].finish_reason == FinishReason.STOP
        assert ended[str(i)].new_token_ids == []


@pytest.mark.parametrize(
    "name",
    [
        "llama, without a head",
        "bert, three classes",
        "albert, layers that share weights",
        "nomic, rotated and gated",
        "modernbert",
    ],
)
def test_a_mixed_batch_has_the_results_of_models_with_merged_adapters(name: str, tmp_path: Path, make: Make) -> None:
    module = make_model(tmp_path, name)
    task = "classify" if "classes" in name else "embed"
    # Adapters of the base model, whose layers have shorter names than those of a model with a head.
    loras = {
        f"r{rank}": lora_request(
            write_adapter(tmp_path / f"r{rank}", module.base_model, Kind(rank, targets=_LAYERS), seed=rank, size=0.1)
        )
        for rank in (4, 8)
    }
    engine = make(runner="pooling", enable_lora=True, max_num_seqs=8, max_num_batched_tokens=96, num_threads=2)
    requests = [
        msgspec.structs.replace(
            request(f"{key} {i}", prompt, task=task, use_activation=False), lora_request=loras.get(key)
        )
        for i, prompt in enumerate(PROMPTS)
        for key in ("base", *loras)
    ]
    try:
        ended = pool(engine.core, requests)
    finally:
        native.set_num_threads(1)
        torch.set_num_threads(1)
    assert engine.core.take_lora_digests() == sorted(lora.digest for lora in loras.values())
    base = array_of(ended["base 3"])
    for key in ("base", *loras):
        merged = copy.deepcopy(module)
        if key != "base":
            merge(merged.base_model, Kind(int(key[1:]), targets=_LAYERS), seed=int(key[1:]), size=0.1)
            assert not np.allclose(array_of(ended[f"{key} 3"]), base, rtol=0.01), "the adapter makes no difference"
        for i, prompt in enumerate(PROMPTS):
            theirs = _pooled(merged, task, prompt, -1 if name.startswith("llama") else 0)
            np.testing.assert_allclose(array_of(ended[f"{key} {i}"]), theirs, rtol=1e-3, atol=2e-4)


def test_a_mean_is_of_all_chunks_also_of_a_prompt_that_lost_its_blocks(tmp_path: Path, make: Make) -> None:
    module = make_model(tmp_path, "qwen3")
    as_sentence_transformers(tmp_path, "pooling_mode_mean_tokens", normalize=True)
    core = make(block_size=4, kv_cache_memory=20 * 4 * 3 * 2 * 2 * 16 * 4).core
    # The first prompt again: its blocks are in the cache, and its hidden states are not.
    again = [request(f"again {i}", PROMPTS[6]) for i in range(3)]
    ended = pool(core, [request("one", PROMPTS[6]), request("other", PROMPTS[3])]) | pool(core, again)
    with torch.no_grad():
        states = module.base_model(input_ids=torch.tensor([PROMPTS[6]])).last_hidden_state[0]
    theirs = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
    for name in ("one", "again 0", "again 2"):
        np.testing.assert_allclose(array_of(ended[name]), theirs, atol=1e-5)


def test_last_token_pooling_reuses_the_cached_prefix(tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "qwen3")
    core = make(runner="pooling", block_size=4).core
    first, again = (pool(core, [request("a", PROMPTS[6])])["a"] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 56)
    np.testing.assert_allclose(array_of(first), array_of(again), atol=1e-5)


def test_embeddings_are_cut_and_normalised_by_the_folder_and_the_request(tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "bert", matryoshka_dimensions=[16, 64])
    as_sentence_transformers(tmp_path, "pooling_mode_cls_token", normalize=False, prompts={"query": "find: "})
    engine = make()
    assert engine.ready.pooling is not None
    assert engine.ready.pooling.prompts == {"query": "find: "}
    ended = pool(
        engine.core,
        [
            request("plain", PROMPTS[0]),
            request("long", PROMPTS[0], use_activation=True),
            request("cut", PROMPTS[0], use_activation=True, dimensions=16),
            request("tokens", PROMPTS[0], task="token_embed"),
        ],
    )
    plain, long, cut, tokens = (array_of(ended[name]) for name in ("plain", "long", "cut", "tokens"))
    np.testing.assert_allclose(long, plain / np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_allclose(cut, plain[:16] / np.linalg.norm(plain[:16]), rtol=1e-5)
    np.testing.assert_allclose(tokens[0], plain, rtol=1e-5)
    refused = engine.core.add_request(request("bad", PROMPTS[0], dimensions=17))
    assert refused is not None
    assert refused.error is not None
    assert refused.error.message == "dimensions must be one of 16, 64 for this model, got 17"


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path, make: Make) -> None:
    module = make_model(tmp_path, "bert, three classes")
    core = make().core
    pair, alone = request("pair", PROMPTS[2]), request("alone", PROMPTS[2])
    pair.second_text_at = 7
    ended = pool(core, [alone, pair, request("other", PROMPTS[4])])
    types = torch.tensor([[0] * 7 + [1] * (len(PROMPTS[2]) - 7)])
    with torch.no_grad():
        theirs = module(input_ids=torch.tensor([PROMPTS[2]]), token_type_ids=types).logits[0].softmax(-1)
    np.testing.assert_allclose(array_of(ended["pair"]), theirs.numpy(), atol=1e-5)
    assert not np.allclose(array_of(ended["pair"]), array_of(ended["alone"]), atol=1e-3)


def test_a_model_with_one_token_type_accepts_pairs_unchanged(tmp_path: Path, make: Make) -> None:
    """Covers rerankers like XLM-RoBERTa, whichever token types the tokenizer returns for the second text."""
    module = make_model(tmp_path, "xlm-roberta, one class")
    pair = request("pair", PROMPTS[2])
    pair.second_text_at = 7
    ended = pool(make().core, [pair, request("alone", PROMPTS[4])])
    with torch.no_grad():
        theirs = module(input_ids=torch.tensor([PROMPTS[2]])).logits[0].sigmoid()
    np.testing.assert_allclose(array_of(ended["pair"]), theirs.numpy(), atol=1e-5)


def test_unsupported_tasks_and_options_of_a_pooling_model_are_refused(tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "roberta")
    engine = make()
    # Two of its 64 positions are before the first token.
    assert engine.ready.max_model_len == 62
    refused = engine.core.add_request(request("bad", PROMPTS[0], task="classify"))
    assert refused is not None
    assert refused.error is not None
    assert refused.error.code == "unsupported_task"
    with pytest.raises(
        ConfigurationError, match="deterministic is for models that generate, but this one is for pooling"
    ):
        make(deterministic=True)


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_compiled_encoder_in_low_precision_matches_single_operations(
    name: str, options: dict[str, Any], tmp_path: Path, make: Make
) -> None:
    make_model(tmp_path, name)
    prompts = [request(str(i), prompt, use_activation=False) for i, prompt in enumerate(PROMPTS)]
    compiled, single = (make(attention_backend=backend, **options) for backend in ("native", "reference"))
    ours, theirs = pool(compiled.core, prompts), pool(single.core, prompts)
    for i in ours:
        assert cosine(array_of(ours[i]), array_of(theirs[i])) >= 0.999


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_any_number_of_threads_embeds_the_same(name: str, tmp_path: Path, make: Make) -> None:
    """Each thread takes whole texts if there are enough; all share a text longer than the others together."""
    make_model(tmp_path, name)
    prompts = [request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    try:
        found = []
        for num_threads in (1, 2, 3):
            core = make(num_threads=num_threads, max_num_seqs=8, max_num_batched_tokens=256).core
            ended = pool(core, prompts) | pool(core, [request("long", PROMPTS[6]), request("short", PROMPTS[1])])
            found.append({request_id: array_of(output) for request_id, output in ended.items()})
    finally:
        native.set_num_threads(1)
    for others in found[1:]:
        for request_id, array in others.items():
            np.testing.assert_array_equal(array, found[0][request_id])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_attention_backend_of_an_encoder_is_selectable(backend: str, tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "bert")
    assert (
        make(attention_backend=backend).ready.attention_backend == {"native": "native", "reference": "torch"}[backend]
    )


def test_an_unavailable_attention_backend_of_an_encoder_is_refused(tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "albert, layers that share weights")
    with pytest.raises(ConfigurationError, match="attention_backend is 'native', but the attention of AlbertModel"):
        make(attention_backend="native")


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_an_encoder_gives_the_same_after_it_slept(options: dict[str, Any], tmp_path: Path, make: Make) -> None:
    make_model(tmp_path, "bert")
    engine = make(**options)
    before = array_of(pool(engine.core, [request("before", PROMPTS[6])])["before"])
    for level in (1, 2):
        ask(engine, Sleep(level=level))
        ask(engine, WakeUp())
        after = array_of(pool(engine.core, [request("after", PROMPTS[6])])["after"])
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("name", "of_ours", "of_torch"), [("bert", 2, 1), ("albert, layers that share weights", 2, 2)])
def test_threads_of_torch_do_not_keep_cores_that_our_own_compute_on(
    name: str, of_ours: int, of_torch: int, tmp_path: Path, make: Make
) -> None:
    make_model(tmp_path, name)
    try:
        make(runner="pooling", num_threads=2)
        assert (native.num_threads(), torch.get_num_threads()) == (of_ours, of_torch)
    finally:
        native.set_num_threads(1)
        torch.set_num_threads(1)
