"""The architectures of GGUF files with experts: rows like those of ``architectures``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .families import Architecture, Family, Place, Places, Shape

if TYPE_CHECKING:
    from torch import Tensor

_GATING_SIGMOID = 2
EXPERTS: dict[str, Places] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    **{f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
}
SHARED_EXPERT: dict[str, Places] = {
    "ffn_gate_inp_shexp": Place("mlp.shared_expert_gate", shape=lambda _family, shape: (1, shape[-1])),
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
GRANITE_FIELDS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def half(name: str, number: int) -> Place:
    """Return one of two tensors that transformers joins along the rows of each matrix."""

    def view(_family: Family, out: Tensor) -> Tensor:
        return out.chunk(2, -2)[number]

    return Place(name, view, lambda _family, shape: (*shape[:-2], 2 * shape[-2], shape[-1]))


def _alternate(name: str, number: int) -> dict[str, Place]:
    """Return the places of weight and bias of a stack whose outputs transformers has in turn with another's."""
    return {
        "weight": Place(
            name,
            lambda _family, out: out.transpose(1, 2)[:, number::2],
            lambda _family, shape: (shape[0], shape[-1], 2 * shape[1]),
        ),
        "bias": Place(
            f"{name}_bias", lambda _family, out: out[:, number::2], lambda _family, shape: (shape[0], 2 * shape[1])
        ),
    }


def _of_mixture(family: Family) -> dict[str, Any]:
    return {
        "num_experts_per_tok": family.number("expert_used_count"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _of_gpt_oss(family: Family) -> dict[str, Any]:
    rope = family.rope()
    # The model was trained with bounds that are no whole numbers, which the file does not say.
    return {"rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope}


def _of_deepseek(family: Family) -> dict[str, Any]:
    rope, rotated = family.rope(), family.number("rope.dimension_count")
    if rope["rope_type"] == "yarn":
        # The file has a tenth of it.
        mscale = 10 * family.real("rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    whole = "attention.key_length_mla" if family.value("attention.key_length_mla") else "attention.key_length"
    values = whole.replace("key", "value")
    return {
        "num_key_value_heads": family.num_heads,
        "rope_parameters": rope,
        "q_lora_rank": family.value("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": family.number(whole) - rotated,
        "v_head_dim": family.number(values),
    }


def _of_deepseek2(family: Family) -> dict[str, Any]:
    groups = {"n_group": family.value("expert_group_count"), "topk_group": family.value("expert_group_used_count")}
    return {
        **_of_deepseek(family),
        **groups,
        "topk_method": "group_limited_greedy" if groups["n_group"] else "greedy",
    }


def _of_glm4_moe(family: Family) -> dict[str, Any]:
    return {
        "attention_bias": family.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": family.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _keys_of_heads(family: Family, out: Tensor) -> Tensor:
    num_keys = _of_deepseek(family)["qk_nope_head_dim"]
    return out.unflatten(0, (family.num_heads, -1))[:, :num_keys].transpose(1, 2)


def _values_of_heads(family: Family, out: Tensor) -> Tensor:
    return out.unflatten(0, (family.num_heads, -1))[:, -_of_deepseek(family)["v_head_dim"] :]


def _keys_and_values(family: Family, shape: Shape, rank_axis: int) -> Shape:
    fields = _of_deepseek(family)
    return family.num_heads * (fields["qk_nope_head_dim"] + fields["v_head_dim"]), shape[rank_axis]


_SHARED_EXPERTS: dict[str, Places] = {
    **EXPERTS,
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_DEEPSEEK_LAYER: dict[str, Places] = {
    **_SHARED_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": Place("self_attn.kv_b_proj", _keys_of_heads, lambda family, shape: _keys_and_values(family, shape, 1)),
    "attn_v_b": Place(
        "self_attn.kv_b_proj", _values_of_heads, lambda family, shape: _keys_and_values(family, shape, -1)
    ),
}
ROUTING = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_DEEPSEEK_FIELDS = {**ROUTING, "kv_lora_rank": "attention.kv_lora_rank"}
_ERNIE_LAYER: dict[str, Places] = {
    **_SHARED_EXPERTS,
    "exp_probs_b.bias": Place(
        "mlp.gate.moe_statics.e_score_correction_bias", shape=lambda _family, shape: (1, shape[-1])
    ),
}
_HUNYUAN_LAYER: dict[str, Places] = {
    **EXPERTS,
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_GATE, _UP = _alternate("mlp.experts.gate_up_proj", 0), _alternate("mlp.experts.gate_up_proj", 1)
_GRANITE_EXPERTS: dict[str, Places] = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": half("block_sparse_moe.input_linear", 0),
    "ffn_up_exps": half("block_sparse_moe.input_linear", 1),
    "ffn_down_exps": "block_sparse_moe.output_linear",
}

MIXTURES = {
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        layer={**EXPERTS, **SHARED_EXPERT},
        fields={
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        constants={"norm_topk_prob": False},
        more=_of_mixture,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        layer=EXPERTS,
        fields={"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
        # llama.cpp computes all models of this architecture like this.
        constants={"norm_topk_prob": True},
        more=_of_mixture,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        layer=EXPERTS,
        fields={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        constants={"norm_topk_prob": False},
    ),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        layer=_GRANITE_EXPERTS,
        fields={**GRANITE_FIELDS, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        is_interleaved=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        layer={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            **{f"ffn_gate_exps.{kind}": place for kind, place in _GATE.items()},
            **{f"ffn_up_exps.{kind}": place for kind, place in _UP.items()},
            "ffn_down_exps.weight": Place(
                "mlp.experts.down_proj",
                lambda _family, out: out.transpose(1, 2),
                lambda _family, shape: (shape[0], shape[-1], shape[1]),
            ),
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        fields={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        window_period=2,
        more=_of_gpt_oss,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        layer={**_SHARED_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        fields={**ROUTING, "n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        constants={"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        rotates_part=True,
        more=_of_glm4_moe,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        layer=_ERNIE_LAYER,
        fields={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        constants={"moe_num_shared_experts": 0},
        more=lambda family: {"use_bias": family.has_tensor("blk.0.attn_output.bias")},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        layer=_HUNYUAN_LAYER,
        fields={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        more=lambda family: {"attention_bias": family.has_tensor("blk.0.attn_q.bias")},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        layer={
            "ffn_gate_inp": "mlp.gate",
            "exp_probs_b.bias": "mlp.e_score_correction_bias",
            "ffn_gate_exps.weight": half("mlp.experts.gate_up_proj", 0),
            "ffn_up_exps.weight": half("mlp.experts.gate_up_proj", 1),
            "ffn_down_exps.weight": "mlp.experts.down_proj",
        },
        fields={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        rotates_part=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        layer=_DEEPSEEK_LAYER,
        fields=_DEEPSEEK_FIELDS,
        head_dim_key="rope.dimension_count",
        more=_of_deepseek2,
    ),
}


def is_sigmoid(family: Family) -> bool:
    """Whether experts are chosen by a sigmoid of their scores."""
    return family.value("expert_gating_func") == _GATING_SIGMOID


DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    layer=_DEEPSEEK_LAYER,
    fields={**_DEEPSEEK_FIELDS, "n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
    constants={"rope_interleave": True, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    head_dim_key="rope.dimension_count",
    more=_of_deepseek,
)
GRANITE_SHARED = Architecture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    layer={
        **_GRANITE_EXPERTS,
        "ffn_gate_shexp": half("shared_mlp.input_linear", 0),
        "ffn_up_shexp": half("shared_mlp.input_linear", 1),
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    fields={**MIXTURES["granitemoe"].fields, "shared_intermediate_size": "expert_shared_feed_forward_length"},
    is_interleaved=True,
)
