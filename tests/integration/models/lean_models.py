"""Small models of the lean families, and a few steps of three requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.models.forward import Forward, ForwardSettings, ModelInput

BLOCK_SIZE = 4
NUM_BLOCKS = 40
SETTINGS = ForwardSettings(max_model_len=64)
SMALL = {
    "vocab_size": 97,
    "hidden_size": 96,
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


def make_model(variant: str, dtype: torch.dtype, **changed: Any) -> PreTrainedModel:
    name, fields = VARIANTS[variant]
    cls = getattr(transformers, name)
    torch.manual_seed(len(variant))
    return cls(cls.config_class(**{**SMALL, **fields, **changed}, attn_implementation="eager")).to(dtype).eval()


def steps(block_size: int = BLOCK_SIZE) -> Iterator[ModelInput]:
    """Three requests: prompts in chunks, decodes beside chunks, decodes alone."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 97, (3, 30), generator=generator)
    table = torch.randperm(NUM_BLOCKS, generator=generator)[:24].view(3, 8)
    computed = [0, 0, 0]
    for work in (((0, 9), (1, 4), (2, 13)), ((0, 1), (1, 7), (2, 5)), ((0, 1), (1, 1), (2, 1)), ((2, 1), (0, 6))):
        yield make_step(work, computed, token_ids, table, block_size)


def make_step(
    work: Sequence[tuple[int, int]], computed: list[int], token_ids: Tensor, table: Tensor, block_size: int
) -> ModelInput:
    """A step of ``(request, new tokens)``, decodes first, on the device of ``token_ids``; ``computed`` goes on."""
    device = token_ids.device
    rows = torch.tensor([row for row, num_new in work for _ in range(num_new)], device=device)
    positions = torch.cat([torch.arange(computed[row], computed[row] + num_new) for row, num_new in work]).to(device)
    for row, num_new in work:
        computed[row] += num_new
    query_lens = [num_new for _, num_new in work]
    return ModelInput(
        token_ids=token_ids[rows, positions],
        positions=positions,
        logit_rows=torch.tensor(query_lens, device=device).cumsum(0) - 1,
        batch=PagedBatch(
            table[[row for row, _ in work]],
            table[rows, positions // block_size] * block_size + positions % block_size,
            query_lens,
            [computed[row] for row, _ in work],
            block_size,
        ),
        state_slots=np.array([row for row, _ in work]),
    )


@torch.inference_mode()
def logits_of(forward: Forward, block_size: int = BLOCK_SIZE) -> list[Tensor]:
    forward.allocate(NUM_BLOCKS, block_size, 3, torch.device("cpu"))
    return [forward.run(step) for step in steps(block_size)]
