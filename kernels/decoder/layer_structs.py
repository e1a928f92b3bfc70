"""Weights as the compiled library takes them. A struct points to tensors and keeps none alive."""

from __future__ import annotations

import ctypes

from ..linear import LinearStruct, PackedWeight
from .structs import EmbeddingPartStruct, LayerEmbeddingsStruct, LayerStruct, NormStruct
from .weights import DecoderWeights, EmbeddingPart, LayerEmbeddings, NormWeights, address


def layer_structs(weights: DecoderWeights) -> ctypes.Array[LayerStruct]:
    """Of all layers; where they keep keys and values, and what is described by structs of its own, is left out."""
    structs = (LayerStruct * len(weights.layers))()
    for index, layer in enumerate(weights.layers):
        norms = (layer.input_norm, layer.attention_norm, layer.mlp_norm, layer.mlp_out_norm)
        heads = weights.heads_of(layer)
        structs[index] = LayerStruct(
            *map(norm_struct, (*norms, layer.query_norm, layer.key_norm, layer.value_norm)),
            *map(linear_struct, (layer.qkv, layer.output, layer.gate_up, layer.down)),
            *(None, None, address(layer.sinks)),
            *(layer.scale, layer.softcap or 0.0, layer.residual_scale),
            *(layer.window or 0, -1 if layer.ahead is None else layer.ahead),
            *(-1 if layer.angles is None else layer.angles, layer.is_interleaved),
            *(layer.norms_rows, layer.norms_follow, layer.is_parallel, layer.activation, layer.is_gated),
            *(layer.gate, None, 0, None),
            *(heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.stores, layer.values_are_keys),
            *(None, address(layer.out_scale)),
        )
    return structs


def embedding_part_struct(part: EmbeddingPart) -> EmbeddingPartStruct:
    return EmbeddingPartStruct(part.gate.struct(), part.output.struct(), norm_struct(part.norm), part.activation)


def layer_embeddings_struct(of: LayerEmbeddings) -> LayerEmbeddingsStruct:
    return LayerEmbeddingsStruct(
        *(of.table.data_ptr(), of.projection.struct(), norm_struct(of.norm), of.size),
        *(of.table_scale, of.projection_scale, of.sum_scale),
    )


def linear_struct(weight: PackedWeight | None) -> LinearStruct:
    return LinearStruct() if weight is None else weight.struct()


def norm_struct(norm: NormWeights | None) -> NormStruct:
    if norm is None:
        return NormStruct(None, None, 0, 0.0)
    kind = 3 if norm.is_centred else 2 if norm.is_wide else 1
    return NormStruct(norm.weight.data_ptr(), address(norm.bias), kind, norm.eps)
