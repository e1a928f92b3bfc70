"""Models of transformers' as GGUF files of every architecture, by the names and the writer of the package gguf."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from penstock.ops.lab.survey.small_config import small_config

from .gguf_conversions import CONVERSIONS as ATTENTION
from .gguf_conversions import Keys
from .gguf_embedders import EMBEDDERS, joined_heads
from .gguf_hybrids import HYBRIDS
from .gguf_models import vocabulary

# Else the tests are skipped.
gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'penstock-llm[dev]'")
CONVERSIONS = {**ATTENTION, **HYBRIDS}
_ALL = {**CONVERSIONS, **EMBEDDERS}


def common_keys(config: Any) -> Keys:
    """Return the keys that llama.cpp's converter writes for every model, if the configuration has them."""
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
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
    values = {key: getattr(config, name, None) for key, name in names.items()}
    values["attention.layer_norm_rms_epsilon"] = values["attention.layer_norm_rms_epsilon"] or getattr(
        config, "norm_eps", None
    )
    values["attention.layer_norm_epsilon"] = values["attention.layer_norm_epsilon"] or getattr(
        config, "norm_epsilon", None
    )
    values["expert_count"] = values["expert_count"] or getattr(config, "num_experts", None)
    values |= {"rope.freq_base": rope["rope_theta"], "rope.freq_base_swa": local.get("rope_theta")}
    if rope["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    elif rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return {key: value for key, value in values.items() if value is not None}


def drawn_model(model_type: str) -> PreTrainedModel:
    """A small random model, also of its norms and biases. ``model_type`` is a key of the conversions."""
    config: PretrainedConfig = small_config(model_type.split()[0])
    for name, value in _ALL[model_type].changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    auto: Any = AutoModel if model_type in EMBEDDERS else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or len(parameter) == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
        if config.tie_word_embeddings and model_type in CONVERSIONS:
            # Else every token would be followed by itself.
            model.get_input_embeddings().weight *= 0.1
    return model


def write_converted(path: Path, model: PreTrainedModel, model_type: str = "", kind_of_layers: str = "") -> Path:
    """Write ``model`` in float32 by the conversion of ``model_type``, by default its own.

    Matrices of layers are written in ``kind_of_layers``, such as Q8_0, if it is set.
    """
    config: Any = copy.deepcopy(model.config)
    # Gemma 4's heads differ by layer; those of most layers are meant.
    config.allow_global_per_layer_attribute_access = True
    conversion = _ALL[model_type or config.model_type]
    key = conversion.architecture
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == key)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, key)
    values = {
        f"{key}.{name}": value
        for name, value in {**common_keys(config), **conversion.keys(config)}.items()
        if value is not None
    }
    values |= vocabulary(config.vocab_size)
    for name, value in values.items():
        _add_value(writer, name, value)
    # Nor does the converter write the head that pretrains BERT.
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    state = model.state_dict()
    tensors: dict[str, list[Any]] = {}
    for name, tensor in (joined_heads(state) if key == "nomic-bert" else state).items():
        if name in tied or name.startswith("pooler."):
            continue
        for converted, numbers in conversion.convert(config, name, tensor):
            # Some conversions give ggml's names.
            is_named = converted.startswith(("blk.", "rope_f", "altup_"))
            target = converted if is_named else names.get_name(converted, try_suffixes=(".weight", ".bias"))
            assert target is not None, f"{converted} has no name in GGUF"
            tensors.setdefault(target, []).append(numbers.numpy())
    for target, matrices in tensors.items():
        # Several make up a stack.
        array = np.ascontiguousarray(matrices[0] if len(matrices) == 1 else np.stack(matrices))
        if kind_of_layers and target.startswith("blk.") and array.ndim > 1:
            form = gguf.GGMLQuantizationType[kind_of_layers]
            writer.add_tensor(target, gguf.quants.quantize(array, form), raw_dtype=form)
        else:
            writer.add_tensor(target, array)
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
