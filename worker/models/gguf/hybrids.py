"""The architectures of GGUF files of which some layers keep a state instead of attending."""

from __future__ import annotations

from typing import Any

from .families import Architecture, Family, Place

_SHORT_CONVOLUTION: dict[str, str | Place] = {
    "shortconv.conv": Place(
        "conv.conv", lambda _family, out: out.squeeze(1), lambda _family, shape: (shape[0], 1, shape[-1])
    ),
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
# Newer and older files.
_TOP = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}


def _of_lfm2(family: Family) -> dict[str, Any]:
    return {"layer_types": [("full_attention" if count else "conv") for count in family.kv_heads_by_layer]}


HYBRIDS = {
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        layer=_SHORT_CONVOLUTION,
        top=_TOP,
        fields={"conv_L_cache": "shortconv.l_cache"},
        constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
        norm_eps="norm_eps",
        more=_of_lfm2,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        layer={
            **_SHORT_CONVOLUTION,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        top=_TOP,
        fields={
            "conv_L_cache": "shortconv.l_cache",
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": "leading_dense_block_count",
        },
        # llama.cpp computes all models of this architecture like this.
        constants={"conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        norm_eps="norm_eps",
        more=_of_lfm2,
    ),
}
