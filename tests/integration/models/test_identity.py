"""Greedy tokens are those of transformers' own ``generate``, however the work is cut up: a dozen architectures.

``make models`` does the same with every architecture of transformers; these stand for what they differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoConfig

from penstock.kernels import native
from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.outcome import SAME, WAYS

from .conftest import SmallModel

ALL_SAME = dict.fromkeys(WAYS, SAME)

# What an architecture is here for, how its configuration shows it, and its model type.
DOZEN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "multi-head": ("gpt_neox", lambda c: not hasattr(c, "num_key_value_heads")),
    "grouped-query": ("llama", lambda c: 1 < c.num_key_value_heads < c.num_attention_heads),
    "multi-query": ("gpt_bigcode", lambda c: c.multi_query),
    "sliding window": ("mistral", lambda c: c.sliding_window < max(map(len, trial.make_prompts()))),
    "alternating windows, and keys of other layers": (
        "gemma4_text",
        lambda c: len(set(c.layer_types)) == 2 and c.num_kv_shared_layers > 0,
    ),
    "soft cap": ("gemma2", lambda c: c.attn_logit_softcapping is not None),
    "attention sinks": ("gpt_oss", lambda c: True),
    "experts": ("qwen3_moe", lambda c: c.num_experts_per_tok < c.num_experts),
    "latent keys and values": ("deepseek_v3", lambda c: c.kv_lora_rank > 0),
    "tied embeddings": ("cohere", lambda c: c.tie_word_embeddings),
    "learned positions": ("gpt2", lambda c: True),
    "partial rotary": ("stablelm", lambda c: c.rope_parameters["partial_rotary_factor"] < 1),
}


@pytest.mark.parametrize("feature", DOZEN)
def test_same_tokens_as_transformers(feature: str, small_model: Callable[[str], SmallModel]) -> None:
    model_type, has_feature = DOZEN[feature]
    model = small_model(model_type)
    assert has_feature(AutoConfig.from_pretrained(model.folder))
    assert model.loaded.forward.mode in ("lean", "packed")
    assert model.compare() == ALL_SAME


@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("lfm2", "lean"),  # convolutions beside attention
        ("qwen3_5_text", "lean"),  # linear attention, and attention with gates
        ("nemotron_h", "lean"),  # Mamba 2, attention and experts, a layer each
        ("qwen3_next", "lean"),  # linear attention in an order of its own, and experts
        ("falcon_h1", "split"),  # Mamba 2 and attention in one layer
        ("falcon", "gather"),  # attends by itself
        ("bloom", "gather"),  # adds positions to its scores
        ("deepseek_v32", "gather"),  # keeps keys for choosing keys
    ],
)
def test_same_tokens_in_the_other_modes(model_type: str, mode: str, small_model: Callable[[str], SmallModel]) -> None:
    model = small_model(model_type)
    # States are mixed by the compiled library, or by transformers.
    assert model.loaded.forward.mode == (mode if mode != "lean" or native.is_loaded() else "split")
    assert model.compare() == ALL_SAME


def test_same_tokens_without_any_attention(small_model: Callable[[str], SmallModel]) -> None:
    """Mamba's prefill cannot continue from a state, so later chunks run token by token."""
    model = small_model("mamba")
    assert (model.loaded.forward.mode, model.loaded.forward.bytes_per_token) == ("split", 0)
    told = model.compare()
    assert told == ALL_SAME | {"preempted": "never"}


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "bamba", "mamba", "falcon"])
def test_same_tokens_on_a_gpu(model_type: str, small_model: Callable[[str], SmallModel]) -> None:
    model = small_model(model_type)
    told = trial.compare(
        model.folder, model.expectation, model.loaded.forward, device="cuda", gpu_memory_utilization=0.1
    )
    assert set(told.values()) <= {SAME, "never"}
