"""Models with windows whose blocks go back: tokens are those of transformers, many windows behind a prompt's beginning.

Caches are full of NaN at first, and again where a block was given back or is taken, so whoever looks at a block that is
not the request's, or behind a window, has no tokens to show.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.cohere2.configuration_cohere2 import Cohere2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.models.forward import Forward
from penstock.worker.models.loading import candidates

from ..harness import SHAPE, VOCAB_SIZE, generate, request

NUM_TOKENS = 12
_SMALL = {**SHAPE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
_SHAPE: dict[str, Any] = {**_SMALL, "head_dim": 16, "initializer_range": 0.5}
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_FEW = {"num_hidden_layers": 5, "sliding_window": 9, "layer_types": _MIXED}
# Their groups: windows, how many layers a page has, and how many pages are little more than one request takes.
Groups = tuple[list[int | None], int, int]
# Of a layer: 4 tokens, keys and values of 16 dimensions, 4 bytes each.
_PAGE_BYTES = 4 * 2 * 16 * 4
MODELS: dict[str, tuple[Callable[[], transformers.PretrainedConfig], Groups]] = {
    "gemma3": (lambda: Gemma3TextConfig(**{**_SHAPE, **_FEW}), ([None, 9, 9, 9, 9], 1, 64)),
    "gemma2": (
        lambda: transformers.Gemma2Config(**{**_SHAPE, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        ([None, 8], 2, 41),
    ),
    "gpt_oss": (
        lambda: transformers.GptOssConfig(
            **{**_SHAPE, "sliding_window": 6}, num_local_experts=4, num_experts_per_tok=2
        ),
        ([None, 6], 2, 41),
    ),
    "cohere2": (
        lambda: Cohere2Config(**{**_SHAPE, **_FEW, "logit_scale": 0.5}),
        ([None, 9, 9, 9, 9], 1, 64),
    ),
    "mistral": (lambda: transformers.MistralConfig(**{**_SHAPE, "sliding_window": 7}), ([7], 4, 9)),
    "phi3": (lambda: transformers.Phi3Config(**{**_SMALL, "initializer_range": 0.5}, sliding_window=5), ([5], 4, 8)),
}


def write_model(config: transformers.PretrainedConfig, folder: Path) -> Any:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


@torch.inference_mode()
def by_transformers(model: Any, prompts: list[list[int]]) -> dict[str, list[int]]:
    config = transformers.GenerationConfig(pad_token_id=0, max_new_tokens=NUM_TOKENS, do_sample=False)
    model.generation_config = config
    return {
        str(index): model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long))[
            0, len(prompt) :
        ].tolist()
        for index, prompt in enumerate(prompts)
    }


def make_prompts() -> list[list[int]]:
    """Two of them begin alike, long enough for several windows."""
    rng = random.Random(1)
    drawn = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (70, 3, 45, 26)]
    return [*drawn, drawn[0][:50] + drawn[3]]


def poison(core: EngineCore, forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill all blocks with NaN, and again those that nobody can find any more, and those that are taken."""
    pool: BlockPool = core.scheduler.block_pool
    allocate, free = pool.allocate, pool.free

    def spoil(blocks: list[int]) -> None:
        for cache in forward.caches:
            cache[blocks] = float("nan")

    def allocate_spoilt(num_blocks: int) -> list[int]:
        blocks = allocate(num_blocks)
        spoil(blocks)
        return blocks

    def free_spoilt(blocks: list[int]) -> None:
        free(blocks)
        spoil([block for block in blocks if pool.hash_of(block) is None and pool.num_free_among([block])])

    for cache in forward.caches:
        cache.fill_(float("nan"))
    monkeypatch.setattr(pool, "allocate", allocate_spoilt)
    monkeypatch.setattr(pool, "free", free_spoilt)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(MODELS, ["native"]),
        ("gemma3", "packed"),
        ("gemma2", "tiles"),
        ("gemma3", "ahead"),
    ],
)
def test_same_tokens_as_transformers_behind_many_windows(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers chunks, batches, preemption and cached prefixes."""
    make_config, (windows, num_places, num_pages) = MODELS[name]
    is_ahead = way == "ahead"
    num_pages *= 1 + is_ahead  # of two steps
    prompts = make_prompts()
    expected = by_transformers(write_model(make_config(), tmp_path), prompts)
    assert len(set(itertools.chain(*expected.values()))) > 6, "a model that repeats itself proves nothing"
    if way in ("packed", "tiles"):
        monkeypatch.setattr(candidates, "CANDIDATES", candidates.CANDIDATES[1:])
    config = EngineConfig(
        model=str(tmp_path),
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
        num_threads=1,
        native_kernels=way == "native" or is_ahead,
        deterministic=way == "tiles",
        async_scheduling=is_ahead,
        kv_cache_memory=(num_pages + 1) * num_places * _PAGE_BYTES,
    )
    engine = build_engine(config, tmp_path)
    core, pages, model = engine.core, engine.control._parts.rpc_engine.pages, engine.control._parts.rpc_engine.model
    assert pages is not None
    assert (list(pages.windows), pages.num_places) == (windows, num_places)
    assert model.forward.mode == ("packed" if way in ("packed", "tiles") else "lean")
    poison(core, model.forward, monkeypatch)
    asked = [request(str(index), prompt, max_tokens=NUM_TOKENS) for index, prompt in enumerate(prompts)]
    with torch.inference_mode():
        assert generate(core, asked) == expected
        assert core.scheduler.stats().num_preemptions > 0 or is_ahead
        again = request("again", prompts[2], max_tokens=8)
        for least_hits in (0, 40):
            before = core.scheduler.stats().prefix_cache_hits
            assert generate(core, [again])["again"] == expected["2"][:8]
            assert core.scheduler.stats().prefix_cache_hits - before >= least_hits
    assert core.scheduler.block_pool.num_blocks <= num_pages
    assert core.scheduler.stats().kv_cache_usage == 0
