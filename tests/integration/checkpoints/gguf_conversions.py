"""How llama.cpp's converter writes each model type: keys, and what it does to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Pairs = Iterable[tuple[str, Tensor]]
Keys = dict[str, Any]


def _no_keys(_config: Any) -> Keys:
    return {}


def _unchanged(_config: Any, name: str, tensor: Tensor) -> Pairs:
    return [(name, tensor)]


@dataclass(frozen=True)
class Conversion:
    """The way a model type is written.

    Args:
        architecture: ggml's name.
        changes: fields of the small configuration that differ.
        keys: what the file says beside ``common_keys``, without the architecture's name.
        convert: a tensor's name and numbers as the package's names know them.
        folds: numbers of the configuration are part of the weights in the file.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Keys] = _no_keys
    convert: Callable[[Any, str, Tensor], Pairs] = _unchanged
    folds: bool = False


def with_one_added(_config: Any, name: str, tensor: Tensor) -> Pairs:
    return [(name, tensor + 1 if name.endswith("norm.weight") else tensor)]


def interleaved(config: Any, name: str, tensor: Tensor) -> Pairs:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if f"{part}." in name), 0)
    if count:
        halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return [(name, tensor)]


def experts_of(config: Any, name: str, tensor: Tensor) -> Pairs:
    """Stacks of experts, whose gate and up matrices transformers joins."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


def window_keys(config: Any) -> Keys:
    return {"attention.sliding_window": config.sliding_window}


def pattern_keys(config: Any) -> Keys:
    return {
        **window_keys(config),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
    }


def scale_keys(config: Any) -> Keys:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


_GEMMA4_MIXTURE = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def gemma4(config: Any, name: str, tensor: Tensor) -> Pairs:
    """The converter adds the divisors of frequencies, by which a part of each head does not rotate."""
    for ending, target in _GEMMA4_MIXTURE.items():
        if name.endswith(ending):
            return [(f"blk.{name.split('.')[2]}.{target}", tensor)]
    pairs = [(f"{name}.weight" if name.endswith("layer_scalar") else name, tensor)]
    if name == "model.norm.weight":
        half = config.to_dict()["per_layer_config"]["1"]["head_dim"] // 2
        num_rotated = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        pairs.append(("rope_freqs.weight", torch.tensor([1.0] * num_rotated + [1e30] * (half - num_rotated))))
    return pairs


def gemma3n(config: Any, name: str, tensor: Tensor) -> Pairs:
    """The projections of AltUp are stacked."""
    for stack, target in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        if f".{stack}." in name:
            return [(f"{target}.weight", tensor)]
    return [(f"{name}.weight" if name.endswith("_scale") else name, tensor)]


def gemma3n_keys(config: Any) -> Keys:
    normal = torch.distributions.Normal(0.0, 1.0)
    return {
        **pattern_keys(config),
        "activation_sparsity_scale": [float(normal.icdf(torch.tensor(s))) for s in config.activation_sparsity_pattern],
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }


def gemma4_keys(config: Any) -> Keys:
    whole = config.to_dict()["per_layer_config"]["1"]["head_dim"]
    return {
        **pattern_keys(config),
        "attention.key_length": whole,
        "attention.value_length": whole,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": config.head_dim,
    }


def softcap_keys(config: Any) -> Keys:
    return {
        **window_keys(config),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def rotated_keys(config: Any) -> Keys:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"])}


def phi3_keys(config: Any) -> Keys:
    original = config.rope_parameters["original_max_position_embeddings"]
    return {
        **rotated_keys(config),
        "attention.sliding_window": config.sliding_window or 0,
        "rope.scaling.original_context_length": original,
    }


def phi3(config: Any, name: str, tensor: Tensor) -> Pairs:
    """The factors of frequencies are tensors."""
    pairs = [(name, tensor)]
    if name == "model.norm.weight":
        factors = {each: torch.tensor(config.rope_parameters[f"{each}_factor"]) for each in ("long", "short")}
        pairs += [(f"rope_factors_{each}.weight", numbers) for each, numbers in factors.items()]
    return pairs


def yarn_keys(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def without_middle_axis(_config: Any, name: str, tensor: Tensor) -> Pairs:
    """Convolutions of one channel each; and LFM2's experts."""
    if "conv.conv" in name:
        tensor = tensor.squeeze(1)
    name = name.replace("expert_bias", "expert_bias.bias")
    parts = experts_of(_config, name, tensor)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return [
        (name.replace("model.", "", 1).replace(proj, names[proj]), numbers)
        if ".experts." in name and (proj := name.split(".")[-2]) in names
        else (name, numbers)
        for name, numbers in parts
    ]


def lfm2_keys(config: Any) -> Keys:
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
    }


def granite_moe(config: Any, name: str, tensor: Tensor) -> Pairs:
    """The converter splits what transformers joins, under ggml's own names of experts."""
    name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
    layer = name.split(".")[2] if ".layers." in name else ""
    halves = {"experts.gate_up_proj": "exps", "shared_mlp.input_linear.weight": "shexp"}
    for ending, kind in halves.items():
        if name.endswith(ending):
            gate, up = tensor.chunk(2, -2)
            return [(f"blk.{layer}.ffn_gate_{kind}.weight", gate), (f"blk.{layer}.ffn_up_{kind}.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", tensor)]
    return interleaved(config, name, tensor)


def gpt_oss(_config: Any, name: str, tensor: Tensor) -> Pairs:
    if name.endswith("self_attn.sinks"):
        return [(f"{name}.weight", tensor)]
    if ".experts." not in name:
        return [(name, tensor)]
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    if kind == "weight":
        tensor = tensor.transpose(1, 2)
    if stem.endswith("down_proj"):
        return [(f"{stem}.{kind}", tensor)]
    stem = stem.removesuffix("gate_up_proj")
    return [(f"{stem}gate_proj.{kind}", tensor[:, ::2]), (f"{stem}up_proj.{kind}", tensor[:, 1::2])]


def deepseek(config: Any, name: str, tensor: Tensor) -> Pairs:
    """Keys and values of heads are split, and the keys transposed."""
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if not name.endswith("kv_b_proj.weight"):
        return experts_of(config, name, tensor)
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(sizes, 1)
    return [(name.replace("kv_b", "k_b"), keys.transpose(1, 2)), (name.replace("kv_b", "v_b"), values)]


def deepseek_keys(config: Any) -> Keys:
    sigmoid = config.model_type == "deepseek_v3"
    rotated, rank = config.qk_rope_head_dim, config.kv_lora_rank
    log = config.rope_parameters.get("mscale_all_dim")
    groups = {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group} if sigmoid else {}
    return {
        **groups,
        "rope.scaling.yarn_log_multiplier": log and 0.1 * log,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2 if sigmoid else 1,
    }


def minimax_keys(config: Any) -> Keys:
    return {
        **rotated_keys(config),
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    }


def corrected_experts(config: Any, name: str, tensor: Tensor) -> Pairs:
    """Write corrections of scores as a vector. Some models have a matrix of one row."""
    if name.endswith("e_score_correction_bias"):
        return [(f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor.flatten())]
    return experts_of(config, name, tensor)


def ernie_moe_keys(config: Any) -> Keys:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": config.moe_layer_interval,
    }


def hunyuan_moe_keys(config: Any) -> Keys:
    return {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def glm4_moe_keys(config: Any) -> Keys:
    return {
        **rotated_keys(config),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
    }


_GRANITE_SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# A part of each head rotates, by factors that depend on the length of a text.
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 128,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
# The larger ones stretch positions in layers that see everything.
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# Of six layers one sees everything.
SIX = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
_FOUR = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "hidden_size_per_layer_input": 32,
}
CONVERSIONS = {
    "gemma": Conversion("gemma", convert=with_one_added),
    "gemma2": Conversion(
        "gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, softcap_keys, with_one_added
    ),
    "gemma3_text": Conversion(
        "gemma3",
        {**SIX, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "rope_parameters": _GEMMA3_ROPE},
        window_keys,
        with_one_added,
    ),
    "gemma3n_text": Conversion("gemma3n", {"tie_word_embeddings": True}, gemma3n_keys, gemma3n),
    "gemma4_text": Conversion("gemma4", {"tie_word_embeddings": True}, gemma4_keys, gemma4),
    "gemma4_text mixture": Conversion("gemma4", {"tie_word_embeddings": True, **_GEMMA4_EXPERTS}, gemma4_keys, gemma4),
    "phi3": Conversion("phi3", {"rope_parameters": _LONG}, phi3_keys, phi3),
    "smollm3": Conversion("smollm3", convert=interleaved),
    "granite": Conversion("granite", _GRANITE_SCALES, scale_keys, interleaved),
    "olmo2": Conversion("olmo2"),
    "olmo3": Conversion("olmo2", keys=pattern_keys),
    "cohere": Conversion("command-r", keys=lambda config: {"logit_scale": config.logit_scale}),
    "cohere2": Conversion("cohere2", _FOUR, lambda config: {**window_keys(config), "logit_scale": config.logit_scale}),
    "ministral3": Conversion("mistral3", keys=yarn_keys, convert=interleaved),
    "glm4": Conversion("glm4", keys=rotated_keys),
    "ernie4_5": Conversion("ernie4_5"),
    "hunyuan_v1_dense": Conversion("hunyuan-dense"),
    "seed_oss": Conversion("seed_oss"),
    "exaone4": Conversion("exaone4", keys=pattern_keys),
    "nemotron": Conversion(
        "nemotron",
        keys=lambda config: {**rotated_keys(config), "attention.layer_norm_epsilon": config.norm_eps},
        convert=with_one_added,
    ),
    "starcoder2": Conversion("starcoder2"),
    "qwen2_moe": Conversion(
        "qwen2moe",
        keys=lambda config: {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        },
        convert=experts_of,
    ),
    "olmoe": Conversion("olmoe", {"num_key_value_heads": 4}, convert=experts_of),
    "granitemoe": Conversion("granitemoe", _GRANITE_SCALES, scale_keys, granite_moe),
    "granitemoeshared": Conversion(
        "granitemoe",
        {**_GRANITE_SCALES, "shared_intermediate_size": 48},
        lambda config: {**scale_keys(config), "expert_shared_feed_forward_length": config.shared_intermediate_size},
        granite_moe,
    ),
    "gpt_oss": Conversion(
        "gpt-oss",
        keys=lambda config: {**window_keys(config), "expert_feed_forward_length": config.intermediate_size},
        convert=gpt_oss,
    ),
    "deepseek_v2": Conversion("deepseek2", {"first_k_dense_replace": 1}, deepseek_keys, deepseek),
    "deepseek_v3": Conversion(
        "deepseek2", {"first_k_dense_replace": 1, "n_group": 2, "rope_parameters": _YARN}, deepseek_keys, deepseek
    ),
    "glm4_moe": Conversion("glm4moe", {"first_k_dense_replace": 1, "use_qk_norm": True}, glm4_moe_keys, deepseek),
    "ernie4_5_moe": Conversion("ernie4_5-moe", keys=ernie_moe_keys, convert=corrected_experts),
    "hunyuan_v1_moe": Conversion("hunyuan-moe", keys=hunyuan_moe_keys, convert=experts_of),
    "minimax_m2": Conversion("minimax-m2", {"rope_parameters": _PARTIAL}, minimax_keys, corrected_experts),
    "lfm2": Conversion("lfm2", {"block_auto_adjust_ff_dim": False}, lfm2_keys, without_middle_axis),
    "lfm2_moe": Conversion(
        "lfm2moe",
        keys=lambda config: {
            **lfm2_keys(config),
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        },
        convert=without_middle_axis,
    ),
}
