"""Models of transformers' as GGUF files of every architecture, by the names and the writer of the package gguf.

What each conversion does to numbers is what llama.cpp's converter does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock.ops.lab.survey.small_config import small_config

from .gguf_models import vocabulary

# Else the tests are skipped.
gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'penstock[dev]'")
Pairs = Iterable[tuple[str, Tensor]]
Keys = dict[str, Any]


def _no_keys(_config: Any) -> Keys:
    return {}


def _unchanged(_config: Any, name: str, tensor: Tensor) -> Pairs:
    return [(name, tensor)]


@dataclass(frozen=True)
class Conversion:
    """How a model type is written.

    Args:
        architecture: ggml's name.
        changes: fields of the small configuration that differ.
        keys: what the file says beside ``common_keys``, without the architecture's name.
        convert: a tensor's name and numbers as the package's names know them.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    keys: Callable[[Any], Keys] = _no_keys
    convert: Callable[[Any, str, Tensor], Pairs] = _unchanged


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


def softcap_keys(config: Any) -> Keys:
    return {
        **window_keys(config),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def rotated_keys(config: Any) -> Keys:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"])}


def yarn_keys(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


_GRANITE_SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# Of six layers one sees everything.
_SIX = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]}
_FOUR = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
CONVERSIONS = {
    "gemma": Conversion("gemma", convert=with_one_added),
    "gemma2": Conversion(
        "gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, softcap_keys, with_one_added
    ),
    "gemma3_text": Conversion(
        "gemma3", {**_SIX, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}, window_keys, with_one_added
    ),
    "phi3": Conversion(
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        lambda config: {**rotated_keys(config), "attention.sliding_window": config.sliding_window or 0},
    ),
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
}


def common_keys(config: Any) -> Keys:
    """What llama.cpp's converter writes for every model, as far as the configuration says it."""
    rope = config.rope_parameters
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    names = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    }
    found = {key: getattr(config, name, None) for key, name in names.items()}
    found["attention.layer_norm_rms_epsilon"] = found["attention.layer_norm_rms_epsilon"] or getattr(
        config, "norm_eps", None
    )
    found["attention.layer_norm_epsilon"] = found["attention.layer_norm_epsilon"] or getattr(
        config, "norm_epsilon", None
    )
    found["expert_count"] = found["expert_count"] or getattr(config, "num_experts", None)
    found |= {"rope.freq_base": rope["rope_theta"], "rope.freq_base_swa": local.get("rope_theta")}
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return {key: value for key, value in found.items() if value is not None}


def drawn_model(model_type: str) -> PreTrainedModel:
    """A small random model, also of its norms and biases."""
    config: PretrainedConfig = small_config(model_type)
    for name, value in CONVERSIONS[model_type].changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        if config.tie_word_embeddings:
            # Else every token would be followed by itself.
            model.get_input_embeddings().weight *= 0.1
    return model


def write_converted(path: Path, model: PreTrainedModel, **more: Any) -> Path:
    """Write ``model`` in float32; ``more`` are further values, dots as ``__``."""
    config: Any = model.config
    conversion = CONVERSIONS[config.model_type]
    key = conversion.architecture
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == key)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, key)
    values = {f"{key}.{name}": value for name, value in {**common_keys(config), **conversion.keys(config)}.items()}
    values |= vocabulary(config.vocab_size)
    for name, value in {**values, **{k.replace("__", "."): v for k, v in more.items()}}.items():
        _add_value(writer, name, value)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        for converted, numbers in conversion.convert(config, name, tensor):
            target = names.get_name(converted, try_suffixes=(".weight", ".bias"))
            assert target is not None, f"{converted} has no name in GGUF"
            writer.add_tensor(target, np.ascontiguousarray(numbers.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
