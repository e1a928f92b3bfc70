"""The weights of a lean network as the compiled decoder takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ....kernels.decoder import DecoderWeights, ExpertsWeights, HeadsShape, LayerWeights, NormWeights
from ....kernels.decoder import EmbeddingPart as EmbeddingPartWeights
from ....kernels.decoder import LayerEmbeddings as LayerEmbeddingsWeights
from ....kernels.gated_activation import ACTIVATIONS
from ....kernels.linear import PackedWeight
from ..placing.packed_linear import OwnPackedLinear
from .forward import LeanForward
from .layers.decoder import LayerEmbeddings
from .layers.feed_forward import GatedMlp, RoutedMlp
from .layers.layer import AnyLayer, EmbeddingPart, HeadNorm, LeanLayer, RowNorm
from .layers.mixing import MixingLayer
from .layers.norms import CentredNorm, NoNorm, Norm


def weights_of(lean: LeanForward) -> DecoderWeights:
    """Return all weights of ``lean``, whose linear layers are packed."""
    network, plan = lean.network, lean.network.plan
    first = next(layer for layer in network.layers if isinstance(layer, LeanLayer))
    final_norm, layer_embeddings = _norm_weights(network.norm), network.layer_embeddings
    assert final_norm is not None
    return DecoderWeights(
        embeddings=network.embed_tokens.weight,
        layers=tuple(_all_layer_weights(lean)),
        final_norm=final_norm,
        lm_head=_packed_weight(network.lm_head),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        token_scale=plan.embedding_scale,
        stream_scale=plan.stream_scale,
        logit_scale=plan.logit_scale,
        logit_softcap=plan.logit_softcap,
        layer_embeddings=None if layer_embeddings is None else _layer_embeddings(layer_embeddings),
    )


def _all_layer_weights(lean: LeanForward) -> Iterator[LayerWeights]:
    windows = iter(lean.windows)
    for layer in lean.network.layers:
        assert isinstance(layer, AnyLayer)
        common = _common_weights(layer)
        if isinstance(layer, LeanLayer):
            yield LayerWeights(**common, **_attention_weights(layer, next(windows)))
        else:
            mixer = layer.weights if isinstance(layer, MixingLayer) else None
            yield LayerWeights(**common, query_norm=None, key_norm=None, scale=1.0, window=None, mixer=mixer)


def _layer_embeddings(embeddings: LayerEmbeddings) -> LayerEmbeddingsWeights:
    plan = embeddings.plan
    return LayerEmbeddingsWeights(
        table=embeddings.embedding.weight,
        projection=_packed_weight(embeddings.projection),
        norm=_norm_weights(embeddings.norm),
        size=plan.size,
        table_scale=plan.embedding_scale,
        projection_scale=plan.projection_scale,
        sum_scale=plan.sum_scale,
    )


def _common_weights(layer: AnyLayer) -> dict[str, Any]:
    routed = layer.mlp if isinstance(layer.mlp, RoutedMlp) else None
    mlp = layer.mlp if routed is None else routed.shared
    assert mlp is None or isinstance(mlp, GatedMlp)
    has_attention = layer.plan.attention is not None
    return {
        "input_norm": _norm_weights(layer.input_norm),
        "mlp_norm": _norm_weights(layer.mlp_norm),
        "attention_norm": _norm_weights(layer.attention_norm),
        "mlp_out_norm": _norm_weights(layer.mlp_out_norm),
        "qkv": _packed_weight(layer.in_proj) if has_attention else None,
        "output": _packed_weight(layer.o_proj) if has_attention else None,
        "gate_up": None if mlp is None else _packed_weight(mlp.gate_up_proj),
        "down": None if mlp is None else _packed_weight(mlp.down_proj),
        "residual_scale": layer.plan.residual_scale,
        "is_parallel": layer.plan.is_parallel,
        "activation": 0 if mlp is None else ACTIVATIONS.index(mlp.activation),
        "is_gated": mlp is None or mlp.is_gated,
        "experts": None if routed is None else _experts_weights(routed),
        "embedding_part": None if layer.embedding_part is None else _embedding_part(layer.embedding_part),
        "out_scale": layer.out_scale,
    }


def _embedding_part(part: EmbeddingPart) -> EmbeddingPartWeights:
    return EmbeddingPartWeights(
        gate=_packed_weight(part.gate),
        output=_packed_weight(part.output),
        norm=_norm_weights(part.norm),
        activation=ACTIVATIONS.index(part.plan.activation),
    )


def _experts_weights(mlp: RoutedMlp) -> ExpertsWeights:
    plan, router = mlp.plan, mlp.router
    return ExpertsWeights(
        router=router.weight,
        router_bias=router.bias,
        choice_bias=router.choice_bias,
        gate_up=[_packed_weight(linear) for linear in mlp.gate_up],
        down=[_packed_weight(linear) for linear in mlp.down],
        num_chosen=plan.router.num_chosen,
        has_sigmoids=plan.router.scoring == "sigmoid",
        renormalizes=plan.router.renormalizes,
        rounds_logits=not plan.router.is_wide,
        rounds_weights=plan.router.rounds_weights,
        scale=plan.router.scale,
        activation=ACTIVATIONS.index(plan.activation),
        is_gated=plan.is_gated,
        clamp=plan.clamp,
        shared_gate=None if mlp.shared_gate is None else _packed_weight(mlp.shared_gate),
        input_norm=_norm_weights(mlp.input_norm),
        router_norm=_norm_weights(router.norm),
        input_scale=router.input_scale,
        input_factor=plan.router.input_factor,
        expert_scale=router.expert_scale,
        out_norm=_norm_weights(mlp.out_norm),
        shared_norm=_norm_weights(mlp.shared_norm),
    )


def _attention_weights(layer: LeanLayer, window: int | None) -> dict[str, Any]:
    attention = layer.attention
    rotation = attention.rotation
    query_norm, key_norm = _head_norms(layer)
    return {
        "query_norm": query_norm,
        "key_norm": key_norm,
        "scale": layer.scale,
        "window": window,
        "norms_rows": attention.norms_rows,
        "norms_follow": attention.norms_follow,
        "angles": None if rotation is None else rotation.source,
        "is_interleaved": rotation is not None and rotation.is_interleaved,
        "softcap": attention.softcap,
        "sinks": layer.sinks,
        "gate": attention.gate,
        "heads": HeadsShape(layer.num_heads, layer.num_kv_heads, layer.head_dim),
        "stores": attention.source is None,
        "values_are_keys": attention.values_are_keys,
        "value_norm": _norm_of_heads(layer.value_norm, layer.value_norm.weight)
        if isinstance(layer.value_norm, HeadNorm)
        else None,
    }


def _head_norms(layer: LeanLayer) -> tuple[NormWeights | None, NormWeights | None]:
    norm = layer.head_norm
    if isinstance(norm, RowNorm):
        return _norm_weights(norm.query), _norm_weights(norm.key)
    if not isinstance(norm, HeadNorm):
        return None, None
    query, key = norm.weight.detach().tensor_split([layer.num_heads])
    return _norm_of_heads(norm, query), _norm_of_heads(norm, key) if len(key) else None


def _norm_of_heads(norm: HeadNorm, weight: Tensor) -> NormWeights:
    return NormWeights(weight, norm.eps, norm.is_centred)


def _norm_weights(norm: nn.Module) -> NormWeights | None:
    if isinstance(norm, NoNorm):
        return None
    assert isinstance(norm, Norm | CentredNorm)
    return NormWeights(norm.weight, norm.eps, isinstance(norm, CentredNorm), norm.bias)


def _packed_weight(linear: object) -> PackedWeight:
    assert isinstance(linear, OwnPackedLinear)
    return linear.packed_weight
