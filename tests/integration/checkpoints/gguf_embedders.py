"""How llama.cpp's converter writes models that read texts as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .gguf_conversions import SIX, Conversion, Keys, Pairs, pattern_keys, with_one_added

MEAN, CLS = 1, 2
_OLD_NAMES = {
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "embeddings.LayerNorm": "emb_ln",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def nomic(config: Any, name: str, tensor: Tensor) -> Pairs:
    """Names of the model's first code; queries, keys and values are joined beforehand."""
    for new, old in _OLD_NAMES.items():
        name = name.replace(new, old)
    return [(name, tensor)]


def joined_heads(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join queries, keys and values of each layer, where there are such."""
    joined: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "self_attn.q_proj" in name:
            parts = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            joined[name.replace("self_attn.q_proj", "attn.Wqkv")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            joined[name] = tensor
    return joined


def gemma_keys(config: Any) -> Keys:
    # Of a window to both sides config.json has the whole.
    return {"attention.sliding_window": 2 * (config.sliding_window - 1), "pooling_type": MEAN}


def modern_keys(config: Any) -> Keys:
    return {
        **pattern_keys(config),
        "attention.sliding_window": config.local_attention,
        "attention.layer_norm_epsilon": config.norm_eps,
        "pooling_type": CLS,
    }


EMBEDDERS = {
    "bert": Conversion("bert", {"is_decoder": False}, lambda _config: {"pooling_type": MEAN}),
    "nomic_bert": Conversion("nomic-bert", keys=lambda _config: {"pooling_type": MEAN}, convert=nomic),
    "gemma3_text embedder": Conversion(
        "gemma-embedding",
        {**SIX, "query_pre_attn_scalar": 16, "use_bidirectional_attention": True},
        gemma_keys,
        with_one_added,
    ),
    "modernbert": Conversion("modern-bert", {"local_attention": 8}, modern_keys),
}
