"""A small configuration of any model type: few layers, narrow, a short vocabulary."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from .overrides import OVERRIDES

VOCAB_SIZE = 128
NUM_LAYERS = 4
# Fields by which transformers' configurations say how large a model is. Those that a type lacks, or that are None in
# its defaults and so switch something on, are passed over.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rotary_dim": 8,
    # Encoder-decoders, of which the decoder is tried.
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": NUM_LAYERS,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "is_decoder": True,
    # Short, so that prompts are longer.
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "attention_window_size": 8,
    # Experts.
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    # Compressed keys and values.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 32,
    # Scores of keys are sums over heads, cut at 0; with few of them many keys score the same 0.
    "index_n_heads": 32,
    # States.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 8,
    "chunk_size": 8,
    "n_groups": 2,
    "lru_width": 64,
    # Wide enough that outputs vary and the two best tokens lie far apart.
    "initializer_range": 0.3,
    "init_std": 0.3,
    "embed_init_std": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types")


def small_config(model_type: str) -> PretrainedConfig:
    """Return the configuration of a small model of ``model_type``. Raises whatever the type itself raises."""
    return _shrink(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))


def _shrink(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> PretrainedConfig:
    """``overrides`` of a nested configuration are a dictionary under its name; None leaves a field at its default."""
    default = config_class()
    defaults = default.to_dict()
    small = _SMALL if "kv_lora_rank" not in defaults else {**_SMALL, "num_key_value_heads": 4}
    fields = {config_class.attribute_map.get(name, name): value for name, value in small.items()}
    fields = {name: value for name, value in fields.items() if defaults.get(name) is not None}
    for name in _KINDS_OF_LAYERS:
        own_name = config_class.attribute_map.get(name, name)
        if defaults.get(own_name):
            kinds = list(dict.fromkeys(defaults[own_name]))
            fields[own_name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    nested_names: Any = config_class.sub_configs
    for name in nested_names:
        nested = getattr(default, name, None)
        if isinstance(nested, PretrainedConfig):
            fields[name] = _shrink(type(nested), overrides.get(name, {}))
    fields |= {name: value for name, value in overrides.items() if name not in nested_names}
    return config_class(**{name: value for name, value in fields.items() if value is not None})
