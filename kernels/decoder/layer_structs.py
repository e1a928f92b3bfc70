"""Structs of the weights for the compiled library. They point to tensors without keeping them alive."""

from __future__ import annotations

import ctypes

from ..linear import LinearStruct, PackedWeight
from .norms import address, norm_struct
from .structs import EmbeddingPartStruct, LayerEmbeddingsStruct, LayerStruct
from .weights import DecoderWeights, EmbeddingPart, LayerEmbeddings


def layer_structs(weights: DecoderWeights) -> ctypes.Array[LayerStruct]:
    """Return the structs of all layers, without the addresses of caches, mixers, experts and embedding parts."""
    structs = (LayerStruct * len(weights.layers))()
    for index, layer in enumerate(weights.layers):
        heads = weights.heads_of(layer)
        structs[index] = LayerStruct(
            input_norm=norm_struct(layer.input_norm),
            attention_norm=norm_struct(layer.attention_norm),
            mlp_norm=norm_struct(layer.mlp_norm),
            mlp_out_norm=norm_struct(layer.mlp_out_norm),
            query_norm=norm_struct(layer.query_norm),
            key_norm=norm_struct(layer.key_norm),
            value_norm=norm_struct(layer.value_norm),
            qkv=linear_struct(layer.qkv),
            output=linear_struct(layer.output),
            gate_up=linear_struct(layer.gate_up),
            down=linear_struct(layer.down),
            sinks=address(layer.sinks),
            scale=layer.scale,
            softcap=layer.softcap or 0.0,
            residual_scale=layer.residual_scale,
            window=layer.window or 0,
            ahead=-1 if layer.ahead is None else layer.ahead,
            angles=-1 if layer.angles is None else layer.angles,
            is_interleaved=layer.is_interleaved,
            norms_rows=layer.norms_rows,
            norms_follow=layer.norms_follow,
            is_parallel=layer.is_parallel,
            activation=layer.activation,
            is_gated=layer.is_gated,
            gate=layer.gate,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            stores=layer.stores,
            values_are_keys=layer.values_are_keys,
            out_scale=address(layer.out_scale),
        )
    return structs


def embedding_part_struct(part: EmbeddingPart) -> EmbeddingPartStruct:
    return EmbeddingPartStruct(part.gate.struct(), part.output.struct(), norm_struct(part.norm), part.activation)


def layer_embeddings_struct(embeddings: LayerEmbeddings) -> LayerEmbeddingsStruct:
    return LayerEmbeddingsStruct(
        table=embeddings.table.data_ptr(),
        projection=embeddings.projection.struct(),
        norm=norm_struct(embeddings.norm),
        size=embeddings.size,
        table_scale=embeddings.table_scale,
        projection_scale=embeddings.projection_scale,
        sum_scale=embeddings.sum_scale,
    )


def linear_struct(weight: PackedWeight | None) -> LinearStruct:
    return LinearStruct() if weight is None else weight.struct()
