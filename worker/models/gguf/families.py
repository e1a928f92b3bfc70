"""What a GGUF file of each architecture is to transformers: its config.json, and the names of its tensors.

Source: llama.cpp's ``convert_hf_to_gguf.py``, read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ....shared.errors import ModelLoadError
from ....shared.shown import shown
from .container import GgufFile
from .rope import real_value, rope_parameters

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
# Rotary frequencies: what they say is in the configuration.
_COMPUTED = re.compile(r"(^|\.)(rope_freqs|attn_rot_embd)\.")
_PARTS = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class _Architecture:
    """How one of llama.cpp's differs from the others.

    Args:
        model_class: transformers' class.
        router: of a mixture, where its router is in a layer.
        experts: of a mixture, by ggml's name the place of an expert's matrix, with a gap for its number.
        is_interleaved: its rotation pairs neighbours, for which queries and keys were put in another order.
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
    """A file together with what its architecture means."""

    file: GgufFile
    key: str
    architecture: _Architecture

    def names(self, name: str, shape: tuple[int, ...]) -> str | list[str]:
        """transformers' name for a tensor, or of a stack of experts a name for each; none of what is computed.

        A name that is unknown stays as it is, so that the loader refuses it by that.
        """
        if _COMPUTED.search(name):
            return []
        found = _PARTS.fullmatch(name)
        if found is None:
            return name
        layer, part, kind = found.groups()
        if layer is None:
            return f"{_TOP[part]}.{kind}" if part in _TOP else name
        here = f"model.layers.{layer}."
        if part in self.architecture.experts and len(shape) == 3:
            of_expert = self.architecture.experts[part]
            return [f"{here}{of_expert.format(number)}.{kind}" for number in range(shape[0])]
        place = self.architecture.router if part == "ffn_gate_inp" else _LAYER.get(part, "")
        return f"{here}{place}.{kind}" if place else name

    def num_interleaved_heads(self, name: str) -> int | None:
        """How many heads the rows of the tensor are, if their order is llama.cpp's own; else None."""
        if not self.architecture.is_interleaved:
            return None
        num_heads = self.number("attention.head_count")
        counts = {"attn_q": num_heads, "attn_k": self.number("attention.head_count_kv", num_heads)}
        found = _PARTS.fullmatch(name)
        return counts.get(found[2]) if found and found[1] is not None else None

    def value(self, name: str, default: Any = None) -> Any:
        return self.file.values.get(f"{self.key}.{name}", default)

    def number(self, name: str, default: int | None = None) -> int:
        """Raises ``ModelLoadError`` if there is none, or one for each layer."""
        found = self.value(name, default)
        if type(found) is not int or found < 1:
            raise ModelLoadError(
                f"{self.file.path} has {self.key}.{name} {shown(found)}, and a model with one number there, 1 or more, "
                "is read; fetch the model in another format"
            )
        return found

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """Raises ``ModelLoadError`` if only a part of a head is rotated, or values are of another size."""
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
        """What config.json would say."""
        values, held = self.file.values, self.file.tensors
        num_heads = self.number("attention.head_count")
        hidden_size = self.number("embedding_length")
        head_dim = self.head_dim(hidden_size, num_heads)
        vocab = held.get("token_embd.weight")
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
            # llama.cpp writes an output matrix only if it is not the embedding.
            "tie_word_embeddings": "output.weight" not in held,
            "dtype": self._dtype(),
            **ids,
            **self.architecture.more(self),
        }

    def _dtype(self) -> str:
        """That of all matrices if they are whole; else bfloat16, which all that have fewer bits fit into."""
        kinds = {tensor.kind.name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return (
            {"F32": "float32", "F16": "float16"}.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"
        )


def find_family(file: GgufFile) -> Family:
    """Raises ``ModelLoadError`` if its architecture is none of those below; names it."""
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
    held = family.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in held, "mlp_bias": "blk.0.ffn_up.bias" in held}


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
        # As llama.cpp computes all of this architecture.
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
# Mistral's are of the architecture "llama", too.
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
