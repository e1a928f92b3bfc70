"""One layer of a Llama-like decoder, in few operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.rms_norm import add_rms_norm, rms_norm
from .feed_forward import make_feed_forward
from .fuse import fuse_linear

# attend(query_key [T, H + KVH, D], value [T, KVH, D], cos [T, D], sin [T, D]) -> [T, H, D]; it rotates, then attends
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    """The weight and epsilon of a normalisation, taken from the model's own module."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight = own.weight
        self.eps = own.variance_epsilon


class HeadNorm(nn.Module):
    """Normalises each query and each key head on its own, by one weight for all of a kind (Qwen3)."""

    def __init__(self, attention: Any, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        weights = [attention.q_norm.weight.detach()] * num_heads + [attention.k_norm.weight.detach()] * num_kv_heads
        self.weight = nn.Parameter(torch.stack(weights), requires_grad=False)
        self.eps = attention.q_norm.variance_epsilon

    def forward(self, heads: Tensor) -> Tensor:
        """``[T, H + KVH, D]`` to the same."""
        return rms_norm(heads, self.weight, self.eps)


class LeanLayer(nn.Module):
    """Attention and feed-forward part of one layer; ``residual`` is the stream that both add to.

    Args:
        own: a decoder layer of transformers, whose weights it takes over.

    Raises:
        ModelLoadError: the layer is not like Llama's.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        attention = own.self_attn
        self.head_dim = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.scale = attention.scaling
        self.input_norm = Norm(own.input_layernorm)
        self.mlp_norm = Norm(own.post_attention_layernorm)
        self.qkv_proj = fuse_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj = attention.o_proj
        has_head_norm = hasattr(attention, "q_norm")
        self.head_norm = HeadNorm(attention, self.num_heads, self.num_kv_heads) if has_head_norm else nn.Identity()
        self.mlp = make_feed_forward(own)

    def attend(
        self, hidden: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Add ``hidden``, what the layer before has made, and return what attention finds, ``[T, H * D]``."""
        normed, residual = add_rms_norm(hidden, residual, self.input_norm.weight, self.input_norm.eps)
        heads = self.qkv_proj(normed).unflatten(-1, (-1, self.head_dim))
        query_key, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        return attend(self.head_norm(query_key), value, cos, sin).flatten(1), residual

    def transform(self, found: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From what attention found to what the layer adds to ``residual`` in the end."""
        normed, residual = add_rms_norm(self.o_proj(found), residual, self.mlp_norm.weight, self.mlp_norm.eps)
        return self.mlp(normed), residual
