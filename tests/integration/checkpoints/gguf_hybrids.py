"""How llama.cpp's converter writes models of which some layers keep a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gguf_conversions import Conversion, Keys, Pairs, experts_of, granite_moe, interleaved, rotated_keys, scale_keys


def _mamba(config: Any, name: str, tensor: Tensor) -> Pairs:
    if name.endswith(".A_log"):
        return [(name, -torch.exp(tensor)[:, None])]
    if name.endswith(".D"):
        return [(name, tensor[:, None])]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if name.endswith("conv1d.weight"):
        return [(name, tensor.squeeze(1))]
    return [(name, tensor)]


def falcon(config: Any, name: str, tensor: Tensor) -> Pairs:
    """Multipliers are part of the weights in the file."""
    for part, factor in {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }.items():
        if part in name:
            return [(name, tensor * factor)]
    if name.endswith("mamba.norm.weight"):
        return [(name, tensor.reshape(config.mamba_n_groups, -1))]
    return _mamba(config, name, tensor)


def nemotron(config: Any, name: str, tensor: Tensor) -> Pairs:
    name = name.replace("model.", "backbone.", 1)
    if name.endswith("mixer.norm.weight"):
        return [(name, tensor.reshape(config.n_groups, -1))]
    return [pair for each, numbers in interleaved(config, name, tensor) for pair in _mamba(config, each, numbers)]


def granite(config: Any, name: str, tensor: Tensor) -> Pairs:
    if name.endswith("mamba.norm.weight"):
        return [(name, tensor.reshape(config.mamba_n_groups, -1))]
    return [pair for each, numbers in granite_moe(config, name, tensor) for pair in _mamba(config, each, numbers)]


def _of_qwen(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def qwen3_next(config: Any, name: str, tensor: Tensor) -> Pairs:
    if not name.endswith("in_proj_qkvz.weight"):
        return experts_of(config, *_of_qwen(name, tensor))
    key, num_keys = config.linear_key_head_dim, config.linear_num_key_heads
    value = config.linear_num_value_heads // num_keys * config.linear_value_head_dim
    q, k, v, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (num_keys, -1)).split([key, key, value, value], 1))
    layer = name.split(".")[2]
    return [(f"blk.{layer}.attn_qkv.weight", torch.cat((q, k, v))), (f"blk.{layer}.attn_gate.weight", z)]


def qwen35(config: Any, name: str, tensor: Tensor) -> Pairs:
    """The heads of values are put in another order."""
    name, tensor = _of_qwen(name, tensor)
    if "linear_attn." not in name or "norm" in name:
        return experts_of(config, name, tensor)
    num_keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    per_key = config.linear_num_value_heads // num_keys

    def tiled(values: Tensor, axis: int, size: int) -> Tensor:
        grouped = values.unflatten(axis, (num_keys, per_key, size)).transpose(axis, axis + 1)
        return grouped.flatten(axis, axis + 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        begin = 2 * num_keys * config.linear_key_head_dim
        return [(name, torch.cat((tensor[:begin], tiled(tensor[begin:], 0, dim))))]
    if "out_proj" in name:
        return [(name, tiled(tensor, 1, dim))]
    return [(name, tiled(tensor, 0, dim if "in_proj_z" in name else 1))]


def mamba_keys(config: Any) -> Keys:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def nemotron_keys(config: Any) -> Keys:
    kinds = config.layers_block_type
    return {
        # Its layers have networks, and no experts.
        "expert_count": None,
        "expert_used_count": None,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [config.intermediate_size * (kind == "mlp") for kind in kinds],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def nemotron_moe_keys(config: Any) -> Keys:
    return {
        **nemotron_keys(config),
        # Of layers with experts.
        "feed_forward_length": [config.moe_intermediate_size * (kind == "moe") for kind in config.layers_block_type],
        "moe_latent_size": config.moe_latent_size,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def nemotron_moe(config: Any, name: str, tensor: Tensor) -> Pairs:
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor)]
    if ".experts." in name:
        part = "up" if "up_proj" in name else "down"
        return [(f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", tensor)]
    return nemotron(config, name, tensor)


def granite_keys(config: Any) -> Keys:
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    return {
        **mamba_keys(config),
        **scale_keys(config),
        "attention.head_count_kv": [config.num_key_value_heads * each for each in attends],
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def qwen_keys(config: Any) -> Keys:
    keys = {
        **rotated_keys(config),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 2,
    }
    if "3_5" in config.model_type:
        keys["rope.dimension_sections"] = [1, 1, 0, 0]
    if getattr(config, "num_experts", None):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return keys


_MULTIPLIERS = {"key_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.5, 2.0]}
_BLOCKS = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
HYBRIDS = {
    "qwen3_next": Conversion("qwen3next", keys=qwen_keys, convert=qwen3_next),
    "qwen3_5_text": Conversion("qwen35", keys=qwen_keys, convert=qwen35),
    "qwen3_5_moe_text": Conversion("qwen35moe", keys=qwen_keys, convert=qwen35),
    "falcon_h1": Conversion(
        "falcon-h1", {"mamba_norm_before_gate": False, **_MULTIPLIERS}, mamba_keys, falcon, folds=True
    ),
    "nemotron_h": Conversion("nemotron_h", {**_BLOCKS, "n_groups": 2}, nemotron_keys, nemotron),
    "nemotron_h with experts": Conversion(
        "nemotron_h_moe",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "routed_scaling_factor": 2.5,
            "moe_latent_size": 32,
        },
        nemotron_moe_keys,
        nemotron_moe,
    ),
    "granitemoehybrid": Conversion(
        "granitehybrid", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}, granite_keys, granite
    ),
}
