"""Translate a GGUF file for transformers: its config.json, and the places of its tensors in transformers' model.

Source: llama.cpp's converter, read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ....shared.errors import ModelLoadError
from ....shared.values.shown import shown
from .container import GgufFile
from .rope import real_value, rope_parameters

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

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
_COMPUTED = re.compile(r"(^|\.)(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.")
_PARTS = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?")


@dataclass(frozen=True)
class Place:
    """Place of a ggml tensor in transformers' model. Functions of two arguments get the file's family first.

    Args:
        name: name of transformers' tensor. "{}" stands for the number of an expert, each of which has its own tensor.
        view: returns the part of transformers' tensor that has ggml's numbers in ggml's order; None for all of it.
        shape: returns the shape of transformers' tensor, given ggml's; None for the same.
        undo: computes transformers' numbers from ggml's; None for the same.
        rows: returns the rows of ggml's tensor that this place has; None for all.
    """

    name: str
    view: Callable[[Family, Tensor], Tensor] | None = None
    shape: Callable[[Family, Shape], Shape] | None = None
    undo: Callable[[Tensor], Tensor] | None = None
    rows: Callable[[Family], slice] | None = None


# A name, or one place or several.
Places = str | Place | tuple[Place, ...]


class Target(NamedTuple):
    """A tensor of transformers' that a tensor of the file fills, or a part of.

    Args:
        part: number of the matrix in the file's tensor, or its rows; None for all of it.
    """

    name: str
    shape: Shape
    part: int | slice | None
    place: Place


@dataclass(frozen=True)
class Architecture:
    """Differences between one of llama.cpp's architectures and Llama.

    Args:
        model_class: transformers' class.
        layer: names in a layer by ggml's names. A key with an ending (".bias", or "." for none) stands for that tensor
            alone, and its value is the whole name.
        top: the same of tensors outside layers.
        fields: fields of the configuration by ggml's keys; left out if the file lacks the key.
        constants: fields of the configuration that are the same in all models, or that ggml assumes.
        norm_eps: the field of the epsilon.
        head_dim_key: ggml's key of ``head_dim``.
        prefix: of the names of layers, before their number.
        is_interleaved: rotation pairs neighbours, for which queries and keys were reordered.
        rotates_part: a part of each head may be rotated.
        adds_one: the weights of norms were stored with 1 added.
        window_period: every layer of this number sees all tokens, others a window; 0 if no layer has a window.
        more: further fields of the configuration.
    """

    model_type: str
    model_class: str
    layer: Mapping[str, Places] = field(default_factory=dict)
    top: Mapping[str, Places] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    norm_eps: str = "rms_norm_eps"
    head_dim_key: str = "attention.key_length"
    prefix: str = "model.layers."
    is_interleaved: bool = False
    rotates_part: bool = False
    adds_one: bool = False
    window_period: int = 0
    more: Callable[[Family], dict[str, Any]] = lambda _family: {}


@dataclass(frozen=True)
class Family:
    """A file with its architecture."""

    file: GgufFile
    key: str
    architecture: Architecture

    def targets(self, name: str, shape: Shape) -> list[Target]:
        """Return the tensors of transformers' that a tensor of ``shape`` fills; empty if it is not needed.

        An unknown tensor keeps its name, so that the loader rejects it by that name.
        """
        match = _PARTS.fullmatch(name)
        if _COMPUTED.search(name):
            return []
        layer, part, kind = match.groups() if match else (None, "", None)
        if layer is not None and int(layer) >= self.num_layers:
            # Layers that predict further tokens.
            return []
        own = self.architecture.top if layer is None else self.architecture.layer
        exact = own.get(f"{part}.{kind or ''}")
        entry = exact or own.get(part) or (_TOP if layer is None else _LAYER).get(part)
        if entry is None:
            return [Target(name, shape, None, Place(name))]
        prefix = "" if layer is None else f"{self.architecture.prefix}{layer}."
        ending = f".{kind}" if kind and not exact else ""
        if isinstance(entry, str):
            entry = self._changed(part, kind, entry)
        return [
            target
            for place in (entry if isinstance(entry, tuple) else (entry,))
            for target in self._of_place(place, prefix, ending, shape)
        ]

    def _of_place(self, place: Place, prefix: str, ending: str, shape: Shape) -> list[Target]:
        inner = place.shape(self, shape) if place.shape else shape
        if "{}" in place.name:
            names = [f"{prefix}{place.name.format(number)}{ending}" for number in range(shape[0])]
            return [Target(each, inner[1:], number, place) for number, each in enumerate(names)]
        return [Target(f"{prefix}{place.name}{ending}", inner, place.rows(self) if place.rows else None, place)]

    def _changed(self, part: str, kind: str | None, name: str) -> Place:
        if self.architecture.adds_one and part.endswith("norm") and kind == "weight":
            return Place(name, undo=lambda values: values - 1)
        if self.architecture.is_interleaved and part in ("attn_q", "attn_k"):
            return Place(name, _halves_of_heads(part))
        return Place(name)

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

    def real(self, name: str, default: float) -> float:
        """Return a number. Raises ``ModelLoadError`` if the value is no number, or negative."""
        return real_value(self.file, f"{self.key}.{name}", default)

    @property
    def num_layers(self) -> int:
        """Layers of the model itself. Layers that predict further tokens follow them in some files."""
        return self.number("block_count") - self.value("nextn_predict_layers", 0)

    @property
    def num_heads(self) -> int:
        return self.number("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values in layers that attend. Raises ``ModelLoadError`` if such layers differ."""
        counts = set(self.kv_heads_by_layer) - {0}
        if len(counts) != 1:
            raise ModelLoadError(
                f"{self.file.path} has {self.key}.attention.head_count_kv {shown(self.kv_heads_by_layer)}, and models "
                "whose layers have the same number of heads are read; fetch the model in another format"
            )
        return counts.pop()

    @property
    def kv_heads_by_layer(self) -> list[int]:
        """Heads of keys and values; 0 in a layer that does not attend."""
        counts = self.value("attention.head_count_kv", self.num_heads)
        if isinstance(counts, list) and len(counts) >= self.num_layers and all(type(each) is int for each in counts):
            return counts[: self.num_layers]
        return [self.number("attention.head_count_kv", self.num_heads)] * self.num_layers

    @property
    def intermediate_size(self) -> int:
        """Width of the layers' own networks. Some layers have none in models that mix kinds of layers."""
        widths = self.value("feed_forward_length")
        distinct = set(widths) - {0} if isinstance(widths, list) else set()
        if len(distinct) == 1:
            return distinct.pop()
        # Files of models whose layers have nothing but experts may lack the other.
        return self.number("feed_forward_length", self.value("expert_feed_forward_length"))

    @property
    def head_dim(self) -> int:
        """Size of a head. Raises ``ModelLoadError`` if values have another size, or only a part of a head is rotated
        where models are rotated whole.
        """
        plain = self.number("embedding_length") // self.num_heads
        rotates_part = self.architecture.rotates_part
        rotated = plain if rotates_part else self.value("rope.dimension_count", plain)
        size = self.number(self.architecture.head_dim_key, rotated)
        if self.architecture.head_dim_key != "attention.key_length":
            return size
        for name in ("attention.value_length", *(() if rotates_part else ("rope.dimension_count",))):
            if self.number(name, size) != size:
                raise ModelLoadError(
                    f"{self.file.path} has {self.key}.{name} {self.value(name)} where heads have {size} numbers, and "
                    "models in which both are the same are read; fetch the model in transformers' format"
                )
        return size

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        values, architecture = self.file.values, self.architecture
        vocab = self.file.tensors.get("token_embd.weight")
        if vocab is None:
            raise ModelLoadError(f"{self.file.path} has no token_embd.weight: it holds no whole model; fetch it again")
        ids = {
            f"{name}_token_id": values.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        }
        own = architecture.more(self)
        derived = {
            "intermediate_size": lambda: self.intermediate_size,
            "num_key_value_heads": lambda: self.num_kv_heads,
            "head_dim": lambda: self.head_dim,
            "rope_parameters": self.rope,
        }
        return {
            "architectures": [architecture.model_class],
            "model_type": architecture.model_type,
            "vocab_size": vocab.shape[0],
            "hidden_size": self.number("embedding_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.number("context_length"),
            architecture.norm_eps: self._epsilon(),
            # llama.cpp writes an output matrix only if it differs from the embedding.
            "tie_word_embeddings": not self.has_tensor("output.weight"),
            "dtype": self._dtype(),
            **ids,
            # Each refuses a file that it cannot express, so that those of the architecture stand in for them.
            **{name: compute() for name, compute in derived.items() if name not in own},
            **(self.windows(architecture.window_period) if architecture.window_period else {}),
            **architecture.constants,
            **{name: self.value(key) for name, key in architecture.fields.items() if self.value(key) is not None},
            **own,
        }

    def rope(self) -> dict[str, Any]:
        """Return ``rope_parameters`` of config.json, of layers that see all tokens."""
        rotated = self.number("rope.dimension_count", self.head_dim)
        rope = rope_parameters(self.file, self.key, rotated)
        return rope | ({"partial_rotary_factor": rotated / self.head_dim} if self.architecture.rotates_part else {})

    def windows(self, period: int) -> dict[str, Any]:
        """Return ``sliding_window`` and ``layer_types`` of config.json.

        Args:
            period: every layer of this number sees all tokens, if the file does not say which layers do.
        """
        window = self.value("attention.sliding_window", 0)
        pattern = self.value("attention.sliding_window_pattern", period)
        slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(self.num_layers)]
        kinds = ["sliding_attention" if window and each else "full_attention" for each in slides]
        return {"sliding_window": window or None, "layer_types": kinds[: self.num_layers]}

    def _epsilon(self) -> float:
        kind = "layer_norm_epsilon" if self.value("attention.layer_norm_epsilon") else "layer_norm_rms_epsilon"
        return self.real(f"attention.{kind}", 1e-6)

    def _dtype(self) -> str:
        """Return the dtype of all matrices if it is the same and unquantized; else bfloat16, which represents fewer
        bits.
        """
        kinds = {tensor.kind.name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return (
            {"F32": "float32", "F16": "float16"}.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"
        )


@cache  # so that places of all layers are equal
def _halves_of_heads(part: str) -> Callable[[Family, Tensor], Tensor]:
    """Return the view of queries or keys in ggml's order: it rotates neighbours, transformers halves of a head."""

    def view(family: Family, out: Tensor) -> Tensor:
        num_heads = family.num_heads if part == "attn_q" else family.num_kv_heads
        if out.shape[0] % (2 * num_heads):
            raise ModelLoadError(
                f"{family.file.path} has {part} with {out.shape[0]} rows, which are not {num_heads} heads "
                f"({family.key}.attention.head_count, or head_count_kv); fetch it again"
            )
        return out.unflatten(0, (num_heads, 2, -1)).transpose(1, 2)

    return view
