"""Minimum bytes and operations of a model's step, from its ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated feed-forward layers, in bfloat16. Norms, under a thousandth, are left out.

    Args:
        layer_weights: of one layer's products: ``E * H * D + 2 * E * KVH * D + H * D * E + 3 * E * F``.
        output_weights: of the last product, ``V * E``, tied to the embedding or not.
        weight_bytes, cached_bytes: of a number of a product's weight, and of a key or value.
    """

    num_layers: int
    layer_weights: int
    output_weights: int
    kv_heads_dim: int
    heads_dim: int
    vocab_size: int
    weight_bytes: int = 2
    cached_bytes: float = 2

    @classmethod
    def read(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        hidden, heads, kv_heads = (
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        return cls(
            num_layers=config["num_hidden_layers"],
            layer_weights=attention + 3 * hidden * config["intermediate_size"],
            output_weights=config["vocab_size"] * hidden,
            kv_heads_dim=kv_heads * head_dim,
            heads_dim=heads * head_dim,
            vocab_size=config["vocab_size"],
        )

    def decode_bytes(self, batch: int, context_tokens: float) -> float:
        """Read by a step that gives each of ``batch`` requests a token: all weights once, and their keys and values."""
        weights = self.num_layers * self.layer_weights + self.output_weights
        cached = batch * context_tokens * self.num_layers * 2 * self.kv_heads_dim
        return self.weight_bytes * weights + self.cached_bytes * cached

    def prefill_flop(self, num_tokens: int) -> float:
        """Return the operations of a prompt: products, causal attention (half the square), and one row of logits."""
        products = 2 * num_tokens * self.num_layers * self.layer_weights + 2 * self.output_weights
        attention = 4 * self.num_layers * self.heads_dim * num_tokens**2 / 2
        return products + attention
