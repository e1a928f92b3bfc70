"""Weights of a decoder in the layout of the compiled library, their structs, and the options in which decoders differ.

Structs point to tensors without keeping them alive.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from ..linear import LinearStruct, PackedWeight
from ..mixers import MixerWeights
from .experts import ExpertsWeights
from .structs import EmbeddingPartStruct, LayerEmbeddingsStruct, LayerStruct, NormWeights, address, norm_struct


class AttentionGate(IntEnum):
    """Position of the sigmoid gates on the attention output in a row of ``qkv``.

    Gates follow each head's query (``WITH_QUERY``), or all heads: one per element of the attention output
    (``PER_ELEMENT``) or one per head (``PER_HEAD``). The values are those of ``kernels/native/decoder/gates.h``.
    """

    NONE = 0
    WITH_QUERY = 1
    PER_ELEMENT = 2
    PER_HEAD = 3


@dataclass(frozen=True)
class HeadsShape:
    """Shape of a layer's heads; ``num_kv_heads`` counts the heads of its cache, whichever layer stores them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class EmbeddingPart:
    """Last part of a layer, which adds a gated per-layer embedding of the token.

    Args:
        gate: projection of the stream to the size of the embedding, which is multiplied by its ``activation``.
        output: projection of the gated embedding to the hidden size.
        norm: norm of that projection before it is added to the stream; None without.
    """

    gate: PackedWeight
    output: PackedWeight
    norm: NormWeights | None
    activation: int


@dataclass(frozen=True)
class LayerEmbeddings:
    """Per-layer embeddings: the sum of a token's row of a table and of a projection of its embedding.

    Args:
        table: ``[V, layers * size]``.
        projection: projection of an embedding ``[hidden size]`` to ``layers * size``.
        norm: norm of the projection, applied to each layer's part; None without.
        table_scale, projection_scale, sum_scale: factors on both, and on their sum.
    """

    table: Tensor
    projection: PackedWeight
    norm: NormWeights | None
    size: int
    table_scale: float
    projection_scale: float
    sum_scale: float


@dataclass(frozen=True)
class LayerWeights:
    """Weights and options of one layer.

    Args:
        input_norm, mlp_norm: norms before attention and before the MLP, ``[hidden size]``; None for no norm.
        query_norm, key_norm: ``[H, D]`` and ``[KVH, D]``; None for no norm.
        qkv, output: projections of attention; ``qkv`` projects to queries, keys and values in this order. Both are None
            for a layer that only has an MLP.
        gate_up, down: projections of the dense MLP; ``gate_up`` projects to the gate, then to the values that it gates,
            or only to the input of the activation. Both are None for a layer without one.
        scale: factor on the scores.
        window: number of positions that a token sees, including its own; None for all before it.
        ahead: number of later positions that it sees, within the ``visible_ends`` of a batch; None for all of these.
        attention_norm, mlp_out_norm: norms of the outputs of both parts, before they are added to the stream.
        norms_rows: the norms of queries and keys span all heads of a token.
        norms_follow: the norms of queries and keys follow the rotation.
        angles: index into a batch's angles; None for no rotation.
        is_interleaved: see ``kernels.rotary.apply_rotary``.
        softcap, sinks: see ``kernels.paged_attention``; sinks in float32.
        residual_scale: factor on the outputs of both parts.
        is_parallel: both parts read the layer's input; without ``mlp_norm`` both use ``input_norm``.
        activation: index into ``kernels.gated_activation.ACTIVATIONS``.
        gate: position of the gates on the attention output.
        mixer: replaces attention; ``qkv`` then projects to its rows, and the other options of attention are ignored.
        experts: mixture of experts; its output is added to that of the dense MLP, if there is one.
        heads: shape of the heads; None for the decoder's.
        stores: the layer stores keys and values; else ``qkv`` only projects to queries, and the layer reads the cache
            of an earlier layer.
        values_are_keys: ``qkv`` projects to queries and keys; values are the keys before their norm and rotation.
        value_norm: ``[KVH, D]``; None for no norm.
        embedding_part: follows the MLP; None without.
        out_scale: ``[1]`` float32, factor on the stream after the layer; None without.
    """

    input_norm: NormWeights | None
    mlp_norm: NormWeights | None
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    qkv: PackedWeight | None
    output: PackedWeight | None
    gate_up: PackedWeight | None
    down: PackedWeight | None
    scale: float
    window: int | None
    attention_norm: NormWeights | None = None
    mlp_out_norm: NormWeights | None = None
    norms_rows: bool = False
    norms_follow: bool = False
    angles: int | None = 0
    is_interleaved: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    residual_scale: float = 1.0
    is_parallel: bool = False
    activation: int = 0
    is_gated: bool = True
    gate: AttentionGate = AttentionGate.NONE
    mixer: MixerWeights | None = None
    experts: ExpertsWeights | None = None
    ahead: int | None = None
    heads: HeadsShape | None = None
    stores: bool = True
    values_are_keys: bool = False
    value_norm: NormWeights | None = None
    embedding_part: EmbeddingPart | None = None
    out_scale: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """Weights and options of a decoder.

    Args:
        embeddings: ``[V, hidden size]``; without rows if every batch has ``inputs_embeds``.
        token_scale: factor on rows of ``embeddings``.
        stream_scale: factor on the input of the first layer, from ``embeddings`` or from ``inputs_embeds``.
        final_norm: None for a model whose last layer ends with a norm.
        lm_head: None to return normalised hidden states instead of logits.
        logit_scale, logit_softcap: factor and soft cap of the logits.
        embeds_by_head: the rows of ``lm_head``, which is in blocks, are those of ``embeddings``. They are read instead,
            so that the table takes no memory.
        norms_stream: the outputs of ``input_norm``, ``mlp_norm`` and ``final_norm`` replace the stream, as in encoders
            that normalise after each addition. Such a norm is listed with the part that follows it.
        num_heads, num_kv_heads, head_dim: shape of the heads of layers without ``heads``.
        layer_embeddings: input of the layers' ``embedding_part``; None without.
    """

    embeddings: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights | None
    lm_head: PackedWeight | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    token_scale: float = 1.0
    stream_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_embeddings: LayerEmbeddings | None = None
    norms_stream: bool = False
    embeds_by_head: bool = False

    def heads_of(self, layer: LayerWeights) -> HeadsShape:
        """Return the shape of the heads of ``layer``, which is one of ``layers``."""
        return layer.heads or HeadsShape(self.num_heads, self.num_kv_heads, self.head_dim)


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
