"""From the lean layout back to transformers' module: each weight under the name that it was taken from.

The inverse of what ``decoder.py``, ``layer.py``, ``norms.py``, ``feed_forward.py`` and ``fuse.py`` do, by the same
plan. What lies in memory is looked at and not copied, unless it is packed or was widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ....shared.errors import ModelLoadError
from ..weights.plain import put_linear, put_modules, put_weight
from .decoder import LeanDecoder
from .feed_forward import GatedMlp, OwnMlp, SharedExpertMlp, SparseMlp
from .layer import AnyLayer, HeadNorm, LeanLayer, RowNorm
from .mixing import MixingLayer
from .norms import AnyNorm, NoNorm
from .plan import AttentionPlan, FeedForwardPlan, NormPlan


def give_back(network: LeanDecoder, own: PreTrainedModel) -> None:
    """Let ``own``, of the class that ``network`` was made of, have its weights.

    Raises:
        ModelLoadError: ``own`` is of another form.
    """
    plan = network.plan
    try:
        put_modules(network.embed_tokens, own.get_submodule(plan.embedding))
        for layer in network.layers:
            assert isinstance(layer, AnyLayer)
            _give_layer(layer, own)
        _give_norm(network.norm, plan.norm, own)
        put_linear(network.lm_head, _linear(own, plan.head))
    except AttributeError as error:
        raise ModelLoadError(f"the model's configuration makes another model than is in memory: {error}") from error


def _give_layer(layer: AnyLayer, own: PreTrainedModel) -> None:
    plan = layer.plan
    _give_norm(layer.input_norm, plan.input_norm, own)
    _give_norm(layer.attention_norm, plan.attention_norm, own)
    _give_norm(layer.mlp_norm, plan.mlp_norm, own)
    _give_norm(layer.mlp_out_norm, plan.mlp_out_norm, own)
    if plan.attention is not None:
        put_linear(layer.o_proj, _linear(own, plan.attention.output))
    if isinstance(layer, LeanLayer):
        _give_attention(layer, own)
    elif isinstance(layer, MixingLayer):
        _give_mixer(layer, own)
    if layer.mlp is not None and plan.mlp is not None:
        _give_feed_forward(layer.mlp, plan.mlp, own)


def _give_attention(layer: LeanLayer, own: PreTrainedModel) -> None:
    plan = layer.attention
    _split_linear(layer.qkv_proj, [_linear(own, name) for name in plan.qkv])
    _give_head_norm(layer, plan, own)
    if plan.sinks is not None and layer.sinks is not None:
        _put_parameter(own, plan.sinks, layer.sinks)


def _give_mixer(layer: MixingLayer, own: PreTrainedModel) -> None:
    plan, weights = layer.mixer, layer.weights
    _split_linear(layer.rows_proj, [_linear(own, name) for name in plan.inner])
    _put_narrow(own.get_submodule(plan.convolution), "weight", weights.taps.T[:, None])
    named = {
        f"{plan.convolution}.bias": weights.taps_bias,
        plan.decay: weights.decay,
        plan.step_bias: weights.step_bias,
        plan.skip: weights.skip,
        f"{plan.norm}.weight": weights.norm,
    }
    for name, tensor in named.items():
        if tensor is not None:
            _put_parameter(own, name, tensor)


def _give_norm(norm: AnyNorm, plan: NormPlan | None, own: PreTrainedModel) -> None:
    if plan is None or isinstance(norm, NoNorm):
        return
    module = own.get_submodule(plan.name)
    if getattr(module, "weight", None) is not None:
        _put_narrow(module, "weight", norm.weight.detach() - plan.offset if plan.is_wide else norm.weight)
    if norm.bias is not None:
        _put_narrow(module, "bias", norm.bias)


def _give_head_norm(layer: LeanLayer, plan: AttentionPlan, own: PreTrainedModel) -> None:
    norm = layer.head_norm
    if isinstance(norm, RowNorm):
        _give_norm(norm.query, plan.query_norm, own)
        _give_norm(norm.key, plan.key_norm, own)
    elif isinstance(norm, HeadNorm):
        of_query, of_key = norm.weight.detach().split([plan.num_heads, plan.num_kv_heads])
        for weight, of_kind in ((of_query, plan.query_norm), (of_key, plan.key_norm)):
            if of_kind is None:
                continue
            module: Any = own.get_submodule(of_kind.name)
            if getattr(module, "weight", None) is not None:
                weight = weight - of_kind.offset if of_kind.is_wide else weight
                # One row for each head; those of a weight that all heads share are the same.
                _put_narrow(module, "weight", weight[0] if module.weight.ndim == 1 else weight)


def _give_feed_forward(mlp: nn.Module, plan: FeedForwardPlan, own: PreTrainedModel) -> None:
    module: Any = own.get_submodule(plan.name)
    if isinstance(mlp, GatedMlp):
        _split_linear(mlp.gate_up_proj, [_linear(own, name) for name in plan.inner])
        put_linear(mlp.down_proj, _linear(own, plan.down))
    elif isinstance(mlp, SharedExpertMlp):
        _give_experts(mlp.routed, module)
        shared = module.shared_expert
        _split_linear(mlp.shared.gate_up_proj, [shared.gate_proj, shared.up_proj])
        put_linear(mlp.shared.down_proj, shared.down_proj)
        put_linear(mlp.gate, module.shared_expert_gate)
    elif isinstance(mlp, SparseMlp):
        _give_experts(mlp, module)
    else:
        assert isinstance(mlp, OwnMlp)
        put_modules(mlp.own, module)
        if mlp.beside is not None:
            put_modules(mlp.beside, own.get_submodule(plan.beside))


def _give_experts(mlp: SparseMlp, own: Any) -> None:
    put_weight(own.gate, "weight", mlp.router_weight)
    put_weight(own.experts, "gate_up_proj", mlp.gate_up_proj)
    put_weight(own.experts, "down_proj", mlp.down_proj)


def _split_linear(fused: nn.Module, parts: Sequence[nn.Linear]) -> None:
    if len(parts) == 1:
        put_linear(fused, parts[0])
        return
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


def _put_narrow(module: nn.Module, name: str, tensor: Tensor) -> None:
    """``put_weight`` of what may have been widened to float32; nothing that its own dtype has is lost on the way."""
    own = cast(Tensor, getattr(module, name))
    put_weight(module, name, tensor.detach().to(own.dtype))


def _put_parameter(own: PreTrainedModel, name: str, tensor: Tensor) -> None:
    holder, _, last = name.rpartition(".")
    _put_narrow(own.get_submodule(holder), last, tensor)


def _linear(own: PreTrainedModel, name: str) -> nn.Linear:
    return cast(nn.Linear, own.get_submodule(name))
