"""Overrides of ``small_config`` for single model types, with reasons."""

from __future__ import annotations

from typing import Any

# Short enough that prompts are longer.
_WINDOW = 8

_SLIDING_AND_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR_AND_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV_AND_FULL: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_UNTIED_INSIDE: dict[str, Any] = _UNTIED | {"text_config": _UNTIED}
_HEAD_DIM: dict[str, Any] = {"head_dim": 16}
_SMALL_WINDOW_HEADS: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
}
_SHARED_KEYS: dict[str, Any] = _SLIDING_AND_FULL | {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_COMPRESSED_INDEX: dict[str, Any] = {
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    # Which layers do what is said in a way of its own, or they all do the same by default.
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": _SLIDING_AND_FULL
    | {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": _WINDOW},
    "granitemoehybrid": _LINEAR_AND_FULL,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONV_AND_FULL,
    "lfm2_moe": _CONV_AND_FULL | {"num_dense_layers": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_head_dim": 16,
        "index_n_heads": 2,
    },
    # With random weights and one matrix for both ends they say their last token again.
    "big_bird": _UNTIED,
    "gemma2": _UNTIED,
    "gemma3": _UNTIED_INSIDE,
    "gemma3_text": _UNTIED,
    "gemma3n_text": _UNTIED
    | _SHARED_KEYS
    | {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4": _UNTIED_INSIDE,
    "gemma4_text": _UNTIED | _SHARED_KEYS,
    "gemma4_unified": _UNTIED_INSIDE,
    "gemma4_unified_text": _UNTIED | _SHARED_KEYS,
    # Its weights start smaller than others', and then it repeats itself too.
    "marian": _UNTIED | {"init_std": 1.0},
    "xlm": _UNTIED | {"causal": True},
    # Its layers run many times over and enlarge rounding: with wide weights to 0.2 % of the logits.
    "hrm_text": {"initializer_range": 0.1},
    # None by default, and needed all the same.
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM,
    "ministral": _HEAD_DIM,
    "nemotron": _HEAD_DIM | {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _COMPRESSED_INDEX},
    "qwen4_exp_text": _COMPRESSED_INDEX,
    "xmod": {"default_language": "en_XX"},
    # Sizes under names of their own, or that have to agree with each other.
    "blt": {
        "encoder_hash_byte_group_vocab": 128,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "dots3_note_text": {
        "head_dim": 32,
        "per_layer_config": {
            layer: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 48} for layer in ("01", "03")
        },
    },
    "inkling2_text": _SMALL_WINDOW_HEADS,
    "inkling_text": _SMALL_WINDOW_HEADS,
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
