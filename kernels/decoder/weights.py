"""The weights of a Llama-like decoder, laid out for the processor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..linear import PackedWeight


@dataclass(frozen=True)
class LayerWeights:
    """One layer.

    Args:
        input_norm, mlp_norm: ``[hidden size]``.
        query_norm, key_norm: ``[D]``, of every head; None where heads are not normalised.
        qkv: queries, keys and values, in this order; ``gate_up``: the gate, then what it opens for.
        scale: factor on the scores.
        window: positions a token sees; None sees all before it.
    """

    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    scale: float
    window: int | None


@dataclass(frozen=True)
class DecoderWeights:
    """All of it.

    Args:
        embeddings: ``[V, hidden size]``.
        norm_eps, head_norm_eps: of the norms of tokens, and of those of heads.
    """

    embeddings: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: PackedWeight
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    head_norm_eps: float


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
