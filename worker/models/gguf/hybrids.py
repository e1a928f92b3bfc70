"""The architectures of GGUF files of which some layers keep a state instead of attending."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .families import Architecture, Family, Place, Places, Shape
from .mixtures import EXPERTS, GRANITE_FIELDS, ROUTING, SHARED_EXPERT, half

if TYPE_CHECKING:
    from torch import Tensor

    View = Callable[[Family, Tensor], Tensor]


def _logarithm(values: Tensor) -> Tensor:
    return (-values).log()


def _flat(_family: Family, shape: Shape) -> Shape:
    return (math.prod(shape),)


def _one_channel(_family: Family, shape: Shape) -> Shape:
    return (shape[0], 1, shape[-1])


def _convolution(name: str) -> Place:
    return Place(name, lambda _family, out: out.squeeze(1), _one_channel)


def _mamba(module: str) -> dict[str, Places]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_out": f"{module}.out_proj",
        "ssm_norm": Place(f"{module}.norm", shape=_flat),
        "ssm_conv1d.weight": _convolution(f"{module}.conv1d.weight"),
        "ssm_conv1d.bias": f"{module}.conv1d.bias",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": Place(f"{module}.A_log", shape=_flat, undo=_logarithm),
        "ssm_d": Place(f"{module}.D", shape=_flat),
    }


_SHORT_CONVOLUTION: dict[str, Places] = {
    "shortconv.conv": _convolution("conv.conv"),
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


def _state_sizes(family: Family) -> tuple[int, int, int]:
    """Return the numbers of key heads and value heads of layers with states, and the size of a value head."""
    num_values = family.number("ssm.time_step_rank")
    return family.number("ssm.group_count"), num_values, family.number("ssm.inner_size") // num_values


def _of_qwen(family: Family) -> dict[str, Any]:
    num_keys, num_values, value_dim = _state_sizes(family)
    interval = family.number("full_attention_interval", 4)
    kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(family.num_layers)]
    return {
        "layer_types": kinds,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": family.number("ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": family.number("ssm.conv_kernel"),
        **({"decoder_sparse_step": 1, "mlp_only_layers": []} if family.value("expert_count") else {}),
    }


def _num_key_rows(family: Family) -> int:
    """Return the number of rows of all queries, which is that of all keys."""
    return family.number("ssm.group_count") * family.number("ssm.state_size")


def _key_rows(begin: int, end: int | None) -> Callable[[Family], slice]:
    """Return the rows from ``begin`` times those of all keys to ``end`` times, None for the last."""
    return lambda family: slice(begin * _num_key_rows(family), None if end is None else end * _num_key_rows(family))


def _grouped(axis: int, *, has_dims: bool = True) -> View:
    """Return the view of value heads by key head: ggml has the first of all key heads before the second of any."""

    def view(family: Family, out: Tensor) -> Tensor:
        num_keys, num_values, value_dim = _state_sizes(family)
        sizes = (num_keys, num_values // num_keys, *((value_dim,) if has_dims else ()))
        return out.unflatten(axis, sizes).transpose(axis, axis + 1)

    return view


def _qkv_and_z(family: Family, _shape: Shape) -> Shape:
    num_rows = 2 * _num_key_rows(family) + 2 * family.number("ssm.inner_size")
    return num_rows, family.number("embedding_length")


def _section(begin: int, end: int) -> View:
    """Return the view of one of four sections of each key head: query, key, values, gates of values."""

    def view(family: Family, out: Tensor) -> Tensor:
        key_dim = family.number("ssm.state_size")
        value_rows = family.number("ssm.inner_size") // family.number("ssm.group_count")
        ends = [0, key_dim, 2 * key_dim, 2 * key_dim + value_rows, 2 * key_dim + 2 * value_rows]
        return out.unflatten(0, (family.number("ssm.group_count"), -1))[:, ends[begin] : ends[end]]

    return view


_QKVZ = "linear_attn.in_proj_qkvz"
_QWEN_LAYER: dict[str, Places] = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": _convolution("linear_attn.conv1d"),
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": Place("linear_attn.A_log", undo=_logarithm),
    "ssm_norm": Place("linear_attn.norm"),
    "ssm_out": "linear_attn.out_proj",
}
_QWEN_NEXT: dict[str, Places] = {
    **_QWEN_LAYER,
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": _QKVZ,
    "attn_qkv": (
        Place(_QKVZ, _section(0, 1), _qkv_and_z, rows=lambda family: slice(0, _num_key_rows(family))),
        Place(
            _QKVZ,
            _section(1, 2),
            _qkv_and_z,
            rows=lambda family: slice(_num_key_rows(family), 2 * _num_key_rows(family)),
        ),
        Place(_QKVZ, _section(2, 3), _qkv_and_z, rows=_key_rows(2, None)),
    ),
    "attn_gate": Place(_QKVZ, _section(3, 4), _qkv_and_z),
}


def _keys_then_values(name: str, *, is_convolution: bool = False) -> tuple[Place, Place]:
    """Return the places of queries and keys, which are in order, and of values, which are not."""

    def flat(out: Tensor) -> Tensor:
        return out.squeeze(1) if is_convolution else out

    def keys(family: Family, out: Tensor) -> Tensor:
        return flat(out)[: 2 * _num_key_rows(family)]

    def values(family: Family, out: Tensor) -> Tensor:
        return _grouped(0)(family, flat(out)[2 * _num_key_rows(family) :])

    shape = _one_channel if is_convolution else None
    return (
        Place(name, keys, shape, rows=_key_rows(0, 2)),
        Place(name, values, shape, rows=_key_rows(2, None)),
    )


_QWEN35: dict[str, Places] = {
    **_QWEN_LAYER,
    "attn_qkv": _keys_then_values("linear_attn.in_proj_qkv"),
    "attn_gate": Place("linear_attn.in_proj_z", _grouped(0)),
    "ssm_beta": Place("linear_attn.in_proj_b", _grouped(0, has_dims=False)),
    "ssm_alpha": Place("linear_attn.in_proj_a", _grouped(0, has_dims=False)),
    "ssm_conv1d": _keys_then_values("linear_attn.conv1d", is_convolution=True),
    "ssm_dt.bias": Place("linear_attn.dt_bias", _grouped(0, has_dims=False)),
    "ssm_a": Place("linear_attn.A_log", _grouped(0, has_dims=False), undo=_logarithm),
    "ssm_out": Place("linear_attn.out_proj", _grouped(1)),
}
_QWEN_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def _of_falcon(family: Family) -> dict[str, Any]:
    num_heads = family.number("ssm.time_step_rank")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": family.number("ssm.inner_size") // num_heads,
        "mamba_conv_bias": family.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_rms_norm": family.has_tensor("blk.0.ssm_norm.weight"),
    }


def _of_nemotron(family: Family) -> dict[str, Any]:
    num_heads = family.number("ssm.time_step_rank")
    widths, network = family.value("feed_forward_length"), "E" if family.value("expert_count") else "-"
    kinds = zip(family.kv_heads_by_layer, widths, strict=False)
    return {
        "hybrid_override_pattern": "".join("*" if heads else network if width else "M" for heads, width in kinds),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": family.number("ssm.inner_size") // num_heads,
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in family.file.tensors),
    }


def _of_granite(family: Family) -> dict[str, Any]:
    num_heads = family.number("ssm.time_step_rank")
    width = family.value("expert_shared_feed_forward_length") or family.intermediate_size
    return {
        "layer_types": ["attention" if heads else "mamba" for heads in family.kv_heads_by_layer],
        "mamba_n_heads": num_heads,
        "mamba_d_head": family.number("ssm.inner_size") // num_heads,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in family.file.tensors),
        "mamba_expand": family.number("ssm.inner_size") // family.number("embedding_length"),
        "num_local_experts": family.value("expert_count", 0),
        "num_experts_per_tok": family.value("expert_used_count", 0),
        "shared_intermediate_size": width,
        "position_embedding_type": "rope" if family.value("rope.scaling.finetuned") else "nope",
    }


_NEMOTRON_LAYER: dict[str, Places] = {
    **_mamba("mixer"),
    "attn_norm": "norm",
    **{f"attn_{name}": f"mixer.{name}_proj" for name in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_TOP = {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}
_NEMOTRON_FIELDS = {"n_groups": "ssm.group_count", "ssm_state_size": "ssm.state_size", "conv_kernel": "ssm.conv_kernel"}
_NEMOTRON_EXPERTS: dict[str, Places] = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{f"ffn_{name}_exps": f"mixer.experts.{{}}.{name}_proj" for name in ("up", "down")},
    **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
}
_MAMBA_FIELDS = {
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}

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
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        layer={**_QWEN_NEXT, **EXPERTS, **SHARED_EXPERT},
        fields=_QWEN_EXPERTS,
        constants={"norm_topk_prob": True},
        rotates_part=True,
        adds_one=True,
        more=_of_qwen,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", layer=_QWEN35, rotates_part=True, adds_one=True, more=_of_qwen
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        layer={**_QWEN35, **EXPERTS, **SHARED_EXPERT},
        fields=_QWEN_EXPERTS,
        rotates_part=True,
        adds_one=True,
        more=_of_qwen,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        layer={
            **_mamba("mamba"),
            # Files have it without an ending.
            "ffn_norm.": "pre_ff_layernorm.weight",
            "ffn_norm": "pre_ff_layernorm",
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        },
        top={"output_norm": "model.final_layernorm"},
        fields={**_MAMBA_FIELDS, "mamba_d_ssm": "ssm.inner_size"},
        # All multipliers of the model are in the weights.
        constants={"mamba_norm_before_gate": False},
        more=_of_falcon,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        "NemotronHForCausalLM",
        layer=_NEMOTRON_LAYER,
        top=_NEMOTRON_TOP,
        fields=_NEMOTRON_FIELDS,
        norm_eps="layer_norm_epsilon",
        is_interleaved=True,
        more=_of_nemotron,
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        "NemotronHForCausalLM",
        layer={**_NEMOTRON_LAYER, **_NEMOTRON_EXPERTS},
        top=_NEMOTRON_TOP,
        fields={
            **_NEMOTRON_FIELDS,
            **ROUTING,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        norm_eps="layer_norm_epsilon",
        is_interleaved=True,
        more=_of_nemotron,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        layer={
            **_mamba("mamba"),
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": half("block_sparse_moe.input_linear", 0),
            "ffn_up_exps": half("block_sparse_moe.input_linear", 1),
            "ffn_down_exps": "block_sparse_moe.output_linear",
            # Of models without experts and with.
            **{f"ffn_gate{kind}": half("shared_mlp.input_linear", 0) for kind in ("", "_shexp")},
            **{f"ffn_up{kind}": half("shared_mlp.input_linear", 1) for kind in ("", "_shexp")},
            **{f"ffn_down{kind}": "shared_mlp.output_linear" for kind in ("", "_shexp")},
        },
        fields={**GRANITE_FIELDS, **_MAMBA_FIELDS},
        is_interleaved=True,
        more=_of_granite,
    ),
}
