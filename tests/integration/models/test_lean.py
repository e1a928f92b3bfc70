"""The lean path gives what the general way gives, for every family it serves, and holds no second copy of a weight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from penstock.kernels.paged_attention import PagedBatch
from penstock.shared.errors import ModelLoadError
from penstock.worker.config import EngineConfig
from penstock.worker.models.folder import resolve_model_folder
from penstock.worker.models.forward import Forward, ForwardSettings, ModelInput
from penstock.worker.models.lean.decoder import FAMILIES
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.loader import load_model
from penstock.worker.models.packed import PackedForward

BLOCK_SIZE = 4
NUM_BLOCKS = 40
SETTINGS = ForwardSettings(max_model_len=64)
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, with biases, wide heads and scaled rope": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama, tied embeddings and as many key heads": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "mistral, with a window": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, with a window in some layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS},
    ),
    "qwen3 moe, with a dense layer": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "mlp_only_layers": [1], "head_dim": 16, **EXPERTS},
    ),
}


def make_model(variant: str, dtype: torch.dtype) -> PreTrainedModel:
    name, fields = VARIANTS[variant]
    cls = getattr(transformers, name)
    torch.manual_seed(len(variant))
    return cls(cls.config_class(**{**SMALL, **fields}, attn_implementation="eager")).to(dtype).eval()


def steps() -> Iterator[ModelInput]:
    """Three requests: prompts in chunks, decodes beside chunks, decodes alone."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 97, (3, 30), generator=generator)
    table = torch.randperm(NUM_BLOCKS, generator=generator)[:24].view(3, 8)
    computed = [0, 0, 0]
    for work in (((0, 9), (1, 4), (2, 13)), ((0, 1), (1, 7), (2, 5)), ((0, 1), (1, 1), (2, 1)), ((2, 1), (0, 6))):
        rows = torch.tensor([row for row, num_new in work for _ in range(num_new)])
        positions = torch.cat([torch.arange(computed[row], computed[row] + num_new) for row, num_new in work])
        for row, num_new in work:
            computed[row] += num_new
        query_lens = [num_new for _, num_new in work]
        yield ModelInput(
            token_ids=token_ids[rows, positions],
            positions=positions,
            logit_rows=torch.tensor(query_lens).cumsum(0) - 1,
            batch=PagedBatch(
                table[[row for row, _ in work]],
                table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
                query_lens,
                [computed[row] for row, _ in work],
                BLOCK_SIZE,
            ),
            state_slots=np.array([row for row, _ in work]),
        )


@torch.inference_mode()
def logits_of(forward: Forward) -> list[Tensor]:
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    return [forward.run(step) for step in steps()]


def test_every_family_has_a_variant_here() -> None:
    assert {name for name, _ in VARIANTS.values()} == FAMILIES


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_are_those_of_the_general_way(variant: str) -> None:
    expected = logits_of(PackedForward(make_model(variant, torch.float32), SETTINGS))
    actual = logits_of(LeanForward(make_model(variant, torch.float32), SETTINGS))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@torch.inference_mode()
def test_a_window_counts() -> None:
    windowed = make_model("mistral, with a window", torch.float32)
    wide = make_model("mistral, with a window", torch.float32)
    wide.config.sliding_window = None
    narrow, full = (logits_of(LeanForward(model, SETTINGS))[-1] for model in (windowed, wide))
    assert not torch.allclose(narrow, full)


@torch.inference_mode()
def test_the_model_itself_goes_on_working_on_the_fused_weights() -> None:
    model = make_model("qwen2", torch.float32)
    token_ids = torch.arange(9)[None]
    before = model(token_ids).logits
    num_bytes = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    lean = LeanForward(model, SETTINGS)
    model.set_attn_implementation("eager")
    assert torch.equal(model(token_ids).logits, before)
    storages = {
        storage.data_ptr(): storage.nbytes()
        for network in (model, lean.network)
        for storage in (parameter.untyped_storage() for parameter in network.parameters())
    }
    assert sum(storages.values()) <= num_bytes + 1024, "a weight is there twice"


def save(folder: Path, variant: str, **fields: Any) -> Path:
    name, own = VARIANTS[variant]
    cls = getattr(transformers, name)
    cls(cls.config_class(**{**SMALL, **own, **fields})).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_loaded_model_is_lean_and_lets_go_of_transformers_layers(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3")
    model = load_model(EngineConfig(model=str(folder)), resolve_model_folder(str(folder)))
    gc.collect()
    assert model.forward.mode == "lean"
    assert not any(type(thing) is Qwen3DecoderLayer for thing in gc.get_objects())


def test_a_relative_with_another_activation_goes_the_general_way(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", hidden_act="gelu")
    model = load_model(EngineConfig(model=str(folder)), resolve_model_folder(str(folder)))
    assert model.forward.mode == "packed"
    with pytest.raises(ModelLoadError, match=r"activation is .*, not SiLU"):
        LeanForward(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, hidden_act="gelu")), SETTINGS)
