"""From the lean layout back to transformers' module: each weight under the name that it was taken from.

The inverse of what ``decoder.py``, ``layer.py``, ``feed_forward.py`` and ``fuse.py`` do. What lies in memory is looked
at and not copied, unless it is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ....shared.errors import ModelLoadError
from ..plain import put_linear, put_modules, put_weight
from .decoder import LeanDecoder
from .feed_forward import GatedMlp, OwnMlp, SharedExpertMlp, SparseMlp
from .layer import HeadNorm, LeanLayer


def give_back(network: LeanDecoder, own: PreTrainedModel) -> None:
    """Let ``own``, of the class that ``network`` was made of, have its weights.

    Raises:
        ModelLoadError: ``own`` is of another form.
    """
    base = cast(Any, own).model
    put_modules(network.embed_tokens, base.embed_tokens)
    if len(base.layers) != len(network.layers):
        raise ModelLoadError(f"the model has {len(network.layers)} layers, and its configuration {len(base.layers)}")
    for layer, place in zip(network.layers, base.layers, strict=True):
        assert isinstance(layer, LeanLayer)
        _give_layer(layer, place)
    put_weight(base.norm, "weight", network.norm.weight)
    put_linear(network.lm_head, cast(Any, own).lm_head)


def _give_layer(layer: LeanLayer, own: Any) -> None:
    attention = own.self_attn
    _split_linear(layer.qkv_proj, [attention.q_proj, attention.k_proj, attention.v_proj])
    put_linear(layer.o_proj, attention.o_proj)
    put_weight(own.input_layernorm, "weight", layer.input_norm.weight)
    put_weight(own.post_attention_layernorm, "weight", layer.mlp_norm.weight)
    if isinstance(layer.head_norm, HeadNorm):
        # One row for each head, and those of a kind are the same.
        put_weight(attention.q_norm, "weight", layer.head_norm.weight[0])
        put_weight(attention.k_norm, "weight", layer.head_norm.weight[layer.num_heads])
    _give_feed_forward(layer.mlp, own.mlp)


def _give_feed_forward(mlp: nn.Module, own: Any) -> None:
    if isinstance(mlp, GatedMlp):
        _split_linear(mlp.gate_up_proj, [own.gate_proj, own.up_proj])
        put_linear(mlp.down_proj, own.down_proj)
    elif isinstance(mlp, SharedExpertMlp):
        _give_feed_forward(mlp.routed, own)
        _give_feed_forward(mlp.shared, own.shared_expert)
        put_linear(mlp.gate, own.shared_expert_gate)
    elif isinstance(mlp, SparseMlp):
        put_weight(own.gate, "weight", mlp.router_weight)
        put_weight(own.experts, "gate_up_proj", mlp.gate_up_proj)
        put_weight(own.experts, "down_proj", mlp.down_proj)
    else:
        assert isinstance(mlp, OwnMlp)
        put_modules(mlp.own, own)


def _split_linear(fused: nn.Module, parts: Sequence[nn.Linear]) -> None:
    weight, bias = cast(Any, fused).weight, cast(Any, fused).bias
    start = 0
    for part in parts:
        end = start + part.out_features
        put_weight(part, "weight", weight[start:end])
        if part.bias is not None:
            put_weight(part, "bias", bias[start:end])
        start = end
    if start != len(weight):
        raise ModelLoadError(f"layers of {len(weight)} outputs in memory have {start} in the model's configuration")
