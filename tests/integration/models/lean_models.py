"""Small models of families that are lean, each with its switches, and a few steps of three requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.models.attention.page_layout import PageLayout
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
# Of these a layer has experts, four of them.
MIXTURES = (
    *("mixtral", "qwen2 moe", "qwen3 moe, with a dense layer", "glm4 moe", "granite moe, shared", "gpt oss"),
    "gemma4, with experts",
)
# Of which lean layers in Python have no other experts than the compiled library's.
COMPILED_ALONE = ("gemma4, with experts",)
# So that nothing that is rounded in another way sends a token to another expert.
ALL_EXPERTS = {"num_experts_per_tok": 4, "top_k_experts": 4}


# Whatever tells families from each other, at least once each. Windows are shorter than the prompts of ``steps``.
_LAYERS = {"num_hidden_layers": 2}
_WINDOW_AND_FULL = {**_LAYERS, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_BASES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_DIM = {"head_dim": 16}
SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaForCausalLM", _DIM),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_DIM, **_WINDOW_AND_FULL, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_DIM, **_WINDOW_AND_FULL, "rope_parameters": _BASES, "query_pre_attn_scalar": 24},
    ),
    # Embeddings of layers, heads of two sizes, and layers that attend to what others have stored.
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **_DIM,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
            "sliding_window": 5,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            # Of six layers as many as the stream has: nothing is told by its size.
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4, whose keys are values": (
        "Gemma4ForCausalLM",
        {
            **_DIM,
            **_WINDOW_AND_FULL,
            "global_head_dim": 32,
            "num_global_key_value_heads": 3,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4, with experts": (
        "Gemma4ForCausalLM",
        {
            **_DIM,
            **_WINDOW_AND_FULL,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 5, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5, "qk_layernorm": False}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", _WINDOW_AND_FULL),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
        },
    ),
    "glm": ("GlmForCausalLM", {**_DIM, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", {**_DIM, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": 0}),
    "ministral": ("MinistralForCausalLM", {**_DIM, **_WINDOW_AND_FULL}),
    "seed_oss": ("SeedOssForCausalLM", {**_DIM, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**_DIM, "use_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", {**_DIM, **_WINDOW_AND_FULL}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("Cohere2ForCausalLM", {**_DIM, **_WINDOW_AND_FULL, "logit_scale": 0.3}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 5, "use_bias": True}),
    "stablelm": ("StableLmForCausalLM", {"use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm, in parallel": ("StableLmForCausalLM", {"use_parallel_residual": True}),
    "nemotron": ("NemotronForCausalLM", {**_DIM, "partial_rotary_factor": 0.5}),
    "arcee": ("ArceeForCausalLM", _DIM),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", _DIM),
    "helium": ("HeliumForCausalLM", _DIM),
    "gpt oss": ("GptOssForCausalLM", {**_DIM, **_WINDOW_AND_FULL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # Sigmoids, a bias of what is chosen, a scale, a dense part beside the experts.
    "glm4 moe": (
        "Glm4MoeForCausalLM",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "pad_token_id": 0,
        },
    ),
    "granite moe, shared": (
        "GraniteMoeSharedForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "initializer_range": 0.1},
    ),
}
VARIANTS |= SWITCHES
# Layers that keep states beside layers that attend.
_MAMBA: dict[str, Any] = {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 80}),
    "lfm3": (
        "Lfm3ForCausalLM",
        {**_DIM, "layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0, "sliding_window": 5},
    ),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        {
            **_DIM,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 32,
        },
    ),
    "qwen3 next": (
        "Qwen3NextForCausalLM",
        {
            **_DIM,
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 32,
        },
    ),
    "bamba": ("BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [1], "mamba_expand": 2}),
    "granite hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "residual_multiplier": 0.3,
            "mamba_conv_bias": False,
        },
    ),
    # Layers of one part each.
    "nemotron hybrid": (
        "NemotronHForCausalLM",
        {
            **_DIM,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 12,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
        },
    ),
}
VARIANTS_WITH_STATES = VARIANTS | STATES


def make_model(variant: str, dtype: torch.dtype, **changed: Any) -> PreTrainedModel:
    name, fields = VARIANTS_WITH_STATES[variant]
    cls = getattr(transformers, name)
    torch.manual_seed(len(variant))
    model = cls(cls.config_class(**{**SMALL, **fields, **changed}, attn_implementation="eager"))
    roughen(model)
    return model.to(dtype).eval()


def roughen(model: PreTrainedModel) -> None:
    """Weights of norms, biases and the like are all alike in a fresh model, and would hide who mixes them up."""
    kept = ("e_score_correction_bias", "layer_scalar")
    buffers = (buffer for name, buffer in model.named_buffers() if name.endswith(kept))
    for tensor in (*model.parameters(), *buffers):
        if tensor.ndim == 1:
            tensor.data += 0.3 * torch.randn_like(tensor)


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
    return [run_and_commit(forward, step) for step in steps(block_size)]


def run_and_commit(forward: Forward, step: ModelInput) -> Tensor:
    logits = forward.run(step)
    forward.commit()
    return logits


def poison(caches: Iterable[Tensor]) -> None:
    """Fill caches so that each slot reads as NaN."""
    for cache in caches:
        # All bits of a scale make it NaN.
        cache.fill_(-1 if cache.dtype == torch.int8 else float("nan"))


def in_groups(step: ModelInput, layout: PageLayout, null_block: int) -> ModelInput:
    """``step``, whose blocks have a page for each group; what lies behind a window is in ``null_block``."""
    old = step.batch
    num_groups, block_size = len(layout.windows), old.block_size
    tables, slots = [], []
    for group, window in enumerate(layout.windows):
        table = old.block_table * num_groups + group
        for row, (query_len, seq_len) in enumerate(zip(old.query_lens, old.seq_lens, strict=True)):
            behind = 0 if window is None else max(0, seq_len - query_len - window + 1) // block_size
            table[row, :behind] = null_block
        blocks, offsets = old.slot_mapping // block_size, old.slot_mapping % block_size
        tables.append(table)
        slots.append((blocks * num_groups + group) * block_size + offsets)
    lens, of_groups = (old.query_lens, old.seq_lens), (torch.stack(tables), torch.stack(slots))
    batch = PagedBatch(tables[0], slots[0], *lens, block_size, group_tables=of_groups[0], group_slots=of_groups[1])
    return replace(step, batch=batch)
