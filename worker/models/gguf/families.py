"""Translate a GGUF file of each architecture for transformers: its config.json, its RoPE, and the names of its tensors.

Source: llama.cpp's ``convert_hf_to_gguf.py``, read backwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary frequencies, which the configuration contains.
_COMPUTED = re.compile(r"(^|\.)(rope_freqs|attn_rot_embd)\.")
_PARTS = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")

_THETA = 10000.0
# Llama 3's scaling, which GGUF stores as a divisor per frequency; values of all released models.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
# Divisors are stored in float32.
_TOLERANCE = 1e-4


def rope_parameters(file: GgufFile, key: str, head_dim: int) -> dict[str, Any]:
    """Return ``rope_parameters`` of config.json.

    Raises:
        ModelLoadError: the scaling of positions cannot be expressed there.
    """
    values = file.values
    theta = real_value(file, f"{key}.rope.freq_base", _THETA)
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, head_dim)
    kind = values.get(f"{key}.rope.scaling.type", "none")
    name = "scaling.factor" if f"{key}.rope.scaling.factor" in values else "scale_linear"
    factor = real_value(file, f"{key}.rope.{name}", 1.0)
    if kind in ("none", "linear") and factor in (0.0, 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    original = values.get(f"{key}.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        original = int(original)
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelLoadError(
        f"{file.path} stretches positions by {key}.rope.scaling.type {shown(kind)}, which is not read from GGUF files; "
        "fetch the model in transformers' format"
    )


def real_value(file: GgufFile, name: str, default: float) -> float:
    """Return a number of ``file``. Raises ``ModelLoadError`` if the value is no number, or negative."""
    value = file.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ModelLoadError(f"{file.path} has {name} {shown(value)}, and a number is wanted there; fetch it again")
    return float(value)


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    tensor = file.tensors["rope_freqs.weight"]
    divisors = np.array(tensor.data).view(np.float32).ravel() if tensor.kind.name == "F32" else np.zeros(0)
    factor = round(float(divisors.max(initial=0.0)), 3)
    if len(divisors) == head_dim // 2 and factor >= 1:
        if factor == 1:
            return {"rope_type": "default", "rope_theta": theta}
        if np.allclose(divisors, llama3_divisors(theta, head_dim, factor), rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _ORIGINAL,
            }
    raise ModelLoadError(
        f"{file.path} has rope_freqs.weight {shown(divisors[:4].tolist())}, which are not Llama 3's divisors of "
        "frequencies; fetch the model in transformers' format"
    )


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return the divisor of each of Llama 3's frequencies: [head_dim / 2]."""
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (_ORIGINAL / wave_lengths - _LOW) / (_HIGH - _LOW)
    return 1 / np.clip((1 - smooth) / factor + smooth, 1 / factor, 1)


@dataclass(frozen=True)
class _Architecture:
    """Differences between one of llama.cpp's architectures and the others.

    Args:
        model_class: transformers' class.
        router: of a mixture of experts, the name of its router in a layer.
        experts: of a mixture of experts, the name of an expert's matrix by ggml's name, with a gap for its number.
        is_interleaved: rotation pairs neighbours, for which queries and keys were reordered.
        more: fields of the configuration that only it has.
    """

    model_type: str
    model_class: str
    is_interleaved: bool = False
    router: str = ""
    experts: dict[str, str] = field(default_factory=dict)
    more: Callable[[Family], dict[str, Any]] = lambda _family: {}


@dataclass(frozen=True)
class Family:
    """A file with its architecture."""

    file: GgufFile
    key: str
    architecture: _Architecture

    def names(self, name: str, shape: tuple[int, ...]) -> str | list[str]:
        """Return transformers' name of a tensor, or one name per matrix of a stack of experts; empty for a computed
        tensor.

        An unknown name is returned unchanged, so that the loader rejects it by that name.
        """
        if _COMPUTED.search(name):
            return []
        match = _PARTS.fullmatch(name)
        if match is None:
            return name
        layer, part, kind = match.groups()
        if layer is None:
            return f"{_TOP[part]}.{kind}" if part in _TOP else name
        here = f"model.layers.{layer}."
        if part in self.architecture.experts and len(shape) == 3:
            expert_name = self.architecture.experts[part]
            return [f"{here}{expert_name.format(number)}.{kind}" for number in range(shape[0])]
        place = self.architecture.router if part == "ffn_gate_inp" else _LAYER.get(part, "")
        return f"{here}{place}.{kind}" if place else name

    def num_interleaved_heads(self, name: str) -> int | None:
        """Return the number of heads in the tensor's rows if they are in llama.cpp's order; else None."""
        if not self.architecture.is_interleaved:
            return None
        num_heads = self.number("attention.head_count")
        counts = {"attn_q": num_heads, "attn_k": self.number("attention.head_count_kv", num_heads)}
        match = _PARTS.fullmatch(name)
        return counts.get(match[2]) if match and match[1] is not None else None

    def value(self, name: str, default: Any = None) -> Any:
        return self.file.values.get(f"{self.key}.{name}", default)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number. Raises ``ModelLoadError`` if it is missing, or differs by layer."""
        value = self.value(name, default)
        if type(value) is not int or value < 1:
            raise ModelLoadError(
                f"{self.file.path} has {self.key}.{name} {shown(value)}, and a model with one number there, 1 or more, "
                "is read; fetch the model in another format"
            )
        return value

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """Return the size of heads. Raises ``ModelLoadError`` if only a part of a head is rotated, or values have
        another size.
        """
        rotated = self.value("rope.dimension_count", hidden_size // num_heads)
        size = self.number("attention.key_length", rotated)
        for name in ("rope.dimension_count", "attention.value_length"):
            if self.number(name, size) != size:
                raise ModelLoadError(
                    f"{self.file.path} has {self.key}.{name} {self.value(name)} where heads have {size} numbers, and "
                    "models in which both are the same are read; fetch the model in transformers' format"
                )
        return size

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        values, tensors = self.file.values, self.file.tensors
        num_heads = self.number("attention.head_count")
        hidden_size = self.number("embedding_length")
        head_dim = self.head_dim(hidden_size, num_heads)
        vocab = tensors.get("token_embd.weight")
        if vocab is None:
            raise ModelLoadError(f"{self.file.path} has no token_embd.weight: it holds no whole model; fetch it again")
        ids = {
            f"{name}_token_id": values.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        return {
            "architectures": [self.architecture.model_class],
            "model_type": self.architecture.model_type,
            "vocab_size": vocab.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.number("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.number("context_length"),
            "rms_norm_eps": real_value(self.file, f"{self.key}.attention.layer_norm_rms_epsilon", 1e-6),
            "rope_parameters": rope_parameters(self.file, self.key, head_dim),
            # llama.cpp writes an output matrix only if it differs from the embedding.
            "tie_word_embeddings": "output.weight" not in tensors,
            "dtype": self._dtype(),
            **ids,
            **self.architecture.more(self),
        }

    def _dtype(self) -> str:
        """Return the dtype of all matrices if it is the same and unquantized; else bfloat16, which represents fewer
        bits.
        """
        kinds = {tensor.kind.name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return (
            {"F32": "float32", "F16": "float16"}.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"
        )


def find_family(file: GgufFile) -> Family:
    """Return the family of ``file``. Raises ``ModelLoadError`` that names its architecture if it is not supported."""
    key = str(file.values.get("general.architecture"))
    architecture = _ARCHITECTURES.get(key)
    if architecture is None:
        raise ModelLoadError(
            f"{file.path} holds a model of the architecture {shown(key)}, and of GGUF files "
            f"{', '.join(_ARCHITECTURES)} are read; fetch the model in transformers' format (there is "
            "--quantization int8)"
        )
    family = Family(file, key, architecture)
    if key == "llama" and family.value("expert_count"):
        return Family(file, key, _MIXTRAL)
    return family


def _biases(family: Family) -> dict[str, Any]:
    tensors = family.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _of_mixtral(family: Family) -> dict[str, Any]:
    return {
        "num_local_experts": family.number("expert_count"),
        "num_experts_per_tok": family.number("expert_used_count"),
    }


def _of_qwen3_moe(family: Family) -> dict[str, Any]:
    return {
        "num_experts": family.number("expert_count"),
        "num_experts_per_tok": family.number("expert_used_count"),
        "moe_intermediate_size": family.number("expert_feed_forward_length"),
        # llama.cpp computes all models of this architecture like this.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_MIXTRAL = _Architecture(
    "mixtral",
    "MixtralForCausalLM",
    is_interleaved=True,
    router="block_sparse_moe.gate",
    experts={
        f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{w}"
        for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    more=_of_mixtral,
)
# Mistral's models have the architecture "llama", too.
_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", is_interleaved=True, more=_biases),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        router="mlp.gate",
        experts={f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
        more=_of_qwen3_moe,
    ),
}
