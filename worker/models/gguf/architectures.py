"""The architectures of GGUF files that are read, one row each, and the family of a file."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile
from .embedders import EMBEDDERS
from .families import Architecture, Family
from .hybrids import HYBRIDS
from .mixtures import DEEPSEEK_V3, GRANITE_FIELDS, GRANITE_SHARED, MIXTURES, is_sigmoid
from .rope import float32_tensor

_AFTER_PARTS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {**_AFTER_PARTS, "ffn_norm": "pre_feedforward_layernorm"}
_LAYER_EMBEDDINGS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_TOP_OF_LAYER_EMBEDDINGS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def find_family(file: GgufFile) -> Family:
    """Return the family of ``file``. Raises ``ModelLoadError`` that names its architecture if it is not supported."""
    key = str(file.values.get("general.architecture"))
    architecture = ARCHITECTURES.get(key)
    if architecture is None:
        raise ModelLoadError(
            f"{file.path} holds a model of the architecture {shown(key)}, and of GGUF files "
            f"{', '.join(ARCHITECTURES)} are read; fetch the model in transformers' format (there is "
            "--quantization int8)"
        )
    family = Family(file, key, architecture)
    variants = VARIANTS.get(key, {})
    return next((Family(file, key, variant) for is_one, variant in variants.items() if is_one(family)), family)


def _biases(family: Family) -> dict[str, Any]:
    return {
        "attention_bias": family.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": family.has_tensor("blk.0.ffn_up.bias"),
    }


def _of_gemma2(family: Family) -> dict[str, Any]:
    # The width per head in the model of 46 layers, 27B. The file does not contain this scale.
    return {"query_pre_attn_scalar": _scale_of_queries(family, 46)}


def _of_gemma3(family: Family) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": family.real("rope.freq_base_swa", 10000.0)}
    return {
        # As with Gemma 2: the model of 62 layers.
        "query_pre_attn_scalar": _scale_of_queries(family, 62),
        "rope_parameters": {"full_attention": family.rope(), "sliding_attention": local},
    }


def _of_gemma4(family: Family) -> dict[str, Any]:
    """Layers that see all tokens have other heads, and rotate the first dimensions of each."""
    kinds = family.windows(6)["layer_types"]
    counts = dict(zip(kinds, family.kv_heads_by_layer, strict=True))
    size = family.number("attention.key_length")
    frequencies = family.file.tensors.get("rope_freqs.weight")
    # Divisors of frequencies that do not rotate are enormous.
    part = float((float32_tensor(family.file, frequencies.name) < 1e9).mean()) if frequencies else 1.0
    theta = {"rope_theta": family.real("rope.freq_base", 1e6)}
    local = {"rope_type": "default", "rope_theta": family.real("rope.freq_base_swa", 10000.0)}
    widths = family.value("feed_forward_length")
    return {
        "intermediate_size": min(widths) if isinstance(widths, list) else family.intermediate_size,
        "use_double_wide_mlp": isinstance(widths, list) and min(widths) < max(widths),
        "head_dim": family.number("attention.key_length_swa", size),
        "global_head_dim": size,
        "num_key_value_heads": counts.get("sliding_attention", counts["full_attention"]),
        "num_global_key_value_heads": counts["full_attention"],
        "attention_k_eq_v": not all(
            family.has_tensor(f"blk.{layer}.attn_v.weight")
            for layer in range(family.num_layers - family.value("attention.shared_kv_layers", 0))
        ),
        "vocab_size_per_layer_input": family.file.tensors["token_embd.weight"].shape[0],
        "enable_moe_block": family.has_tensor("blk.0.ffn_gate_inp.weight"),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": part, **theta},
            "sliding_attention": local,
        },
    }


def _of_gemma3n(family: Family) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": family.real("rope.freq_base_swa", 10000.0)}
    # Standard deviations above the mean that an input needs, where config.json has the share that stays below.
    thresholds = family.value("activation_sparsity_scale", [])
    return {
        "intermediate_size": family.value("feed_forward_length"),
        "vocab_size_per_layer_input": family.file.tensors["per_layer_token_embd.weight"].shape[0],
        "laurel_rank": family.file.tensors["blk.0.laurel_l.weight"].shape[0],
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in thresholds] or None,
        "rope_parameters": {"full_attention": family.rope(), "sliding_attention": local},
    }


def _scale_of_queries(family: Family, num_layers_of_the_largest: int) -> int:
    if family.num_layers == num_layers_of_the_largest:
        return family.number("embedding_length") // family.num_heads
    return family.head_dim


def _of_phi3(family: Family) -> dict[str, Any]:
    return {
        "sliding_window": family.value("attention.sliding_window") or None,
        "original_max_position_embeddings": family.number(
            "rope.scaling.original_context_length", family.number("context_length")
        ),
    }


def _of_ministral3(family: Family) -> dict[str, Any]:
    mscale = family.real("rope.scaling.yarn_log_multiplier", 1.0)
    more = {"mscale": mscale, "mscale_all_dim": mscale}
    return {
        "rope_parameters": {
            **family.rope(),
            **more,
            "llama_4_scaling_beta": family.real("attention.temperature_scale", 0.0),
        }
    }


def _of_olmo3(family: Family) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": family.real("rope.freq_base", 10000.0)}
    return {"rope_parameters": {"full_attention": family.rope(), "sliding_attention": local}}


def _of_cohere(family: Family) -> dict[str, Any]:
    return {"use_qk_norm": family.has_tensor("blk.0.attn_q_norm.weight")}


def _of_seed_oss(family: Family) -> dict[str, Any]:
    return {**_biases(family), "attention_out_bias": family.has_tensor("blk.0.attn_output.bias")}


def _of_ernie(family: Family) -> dict[str, Any]:
    return {"use_bias": family.has_tensor("blk.0.attn_output.bias")}


_LLAMA = Architecture("llama", "LlamaForCausalLM", is_interleaved=True, more=_biases)
_GEMMA = Architecture("gemma", "GemmaForCausalLM", adds_one=True)
_OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", layer=_AFTER_PARTS)


def _has(key: str) -> Callable[[Family], bool]:
    return lambda family: bool(family.value(key))


# Model types that share an architecture with others: by what is true of their files alone.
VARIANTS: dict[str, dict[Callable[[Family], bool], Architecture]] = {
    "granitemoe": {_has("expert_shared_feed_forward_length"): GRANITE_SHARED},
    "deepseek2": {is_sigmoid: DEEPSEEK_V3},
    "llama": {
        _has("expert_count"): Architecture(
            "mixtral",
            "MixtralForCausalLM",
            is_interleaved=True,
            layer={
                "ffn_gate_inp": "block_sparse_moe.gate",
                **{
                    f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{w}"
                    for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
                },
            },
            fields={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        )
    },
    "olmo2": {
        _has("attention.sliding_window"): Architecture(
            "olmo3", "Olmo3ForCausalLM", layer=_AFTER_PARTS, window_period=4, more=_of_olmo3
        )
    },
    "mistral3": {
        _has("attention.temperature_scale"): Architecture(
            "ministral3", "Ministral3ForCausalLM", is_interleaved=True, more=_of_ministral3
        )
    },
}
ARCHITECTURES: dict[str, Architecture] = {
    # Mistral's models have the architecture "llama", too.
    "llama": _LLAMA,
    "mistral3": Architecture("mistral", "MistralForCausalLM", is_interleaved=True, constants={"sliding_window": None}),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": _GEMMA,
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        layer=_GEMMA_NORMS,
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adds_one=True,
        window_period=2,
        more=_of_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        layer=_GEMMA_NORMS,
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        adds_one=True,
        window_period=6,
        more=_of_gemma3,
    ),
    "gemma-embedding": Architecture(
        "gemma3_text",
        "Gemma3TextModel",
        layer=_GEMMA_NORMS,
        top={"token_embd": "embed_tokens", "output_norm": "norm"},
        constants={"use_bidirectional_attention": True},
        prefix="layers.",
        adds_one=True,
        window_period=6,
        more=_of_gemma3,
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        layer={
            **_GEMMA_NORMS,
            **_LAYER_EMBEDDINGS,
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
        },
        top={
            **_TOP_OF_LAYER_EMBEDDINGS,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        fields={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_active_idx": "altup.active_idx",
            "altup_num_inputs": "altup.num_inputs",
        },
        window_period=5,
        more=_of_gemma3n,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        layer={
            **_GEMMA_NORMS,
            "layer_output_scale.weight": "layer_scalar",
            **_LAYER_EMBEDDINGS,
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        top=_TOP_OF_LAYER_EMBEDDINGS,
        fields={
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        window_period=6,
        more=_of_gemma4,
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", layer=_FUSED, rotates_part=True, more=_of_phi3),
    "smollm3": Architecture(
        "smollm3", "SmolLM3ForCausalLM", is_interleaved=True, constants={"no_rope_layer_interval": 4}, more=_biases
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", is_interleaved=True, fields=GRANITE_FIELDS, more=_biases),
    "olmo2": _OLMO2,
    "command-r": Architecture(
        "cohere", "CohereForCausalLM", norm_eps="layer_norm_eps", fields={"logit_scale": "logit_scale"}, more=_of_cohere
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        norm_eps="layer_norm_eps",
        fields={"logit_scale": "logit_scale"},
        window_period=4,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        layer={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rotates_part=True,
        more=_biases,
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", more=_of_ernie),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        layer={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        more=_biases,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        layer={"post_attention_norm": "post_attention_layernorm"},
        more=_of_seed_oss,
    ),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", layer=_AFTER_PARTS, window_period=4),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        norm_eps="norm_eps",
        rotates_part=True,
        adds_one=True,
        more=_biases,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        layer={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps="norm_epsilon",
        constants={"sliding_window": None},
        more=lambda family: {"use_bias": family.has_tensor("blk.0.attn_output.bias")},
    ),
    **MIXTURES,
    **HYBRIDS,
    **EMBEDDERS,
}
