"""The weights of a decoder, laid out for the processor, and what tells one decoder from another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from ..linear import PackedWeight
from ..mixers import MixerWeights
from .experts import ExpertsWeights
from .norms import NormWeights


class AttentionGate(IntEnum):
    """Position of the sigmoid gates on the attention output in a row of ``qkv``.

    Gates follow each head's query (``WITH_QUERY``), or all heads: one per element of the attention output
    (``PER_ELEMENT``) or one per head (``PER_HEAD``). The values are those of ``kernels/native/gates.h``.
    """

    NONE = 0
    WITH_QUERY = 1
    PER_ELEMENT = 2
    PER_HEAD = 3


@dataclass(frozen=True)
class HeadsShape:
    """Of a layer's heads; ``num_kv_heads`` are those of its cache, whoever stores there."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class EmbeddingPart:
    """A last part of a layer, which lets the layer's own embedding of a token in.

    Args:
        gate: from the stream to as many numbers as the embedding has; their ``activation`` opens for it.
        output: from what comes of that to the stream, to which it is added once it is normalised.
    """

    gate: PackedWeight
    output: PackedWeight
    norm: NormWeights | None
    activation: int


@dataclass(frozen=True)
class LayerEmbeddings:
    """What embedding parts of layers are given: what a token has in a table, and what its embedding is projected to.

    Args:
        table: ``[V, layers * size]``.
        projection: of an embedding ``[hidden size]`` to as many numbers, which are normalised layer by layer.
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
    """One layer.

    Args:
        input_norm, mlp_norm: before attention and before the feed-forward part, ``[hidden size]``; None without.
        query_norm, key_norm: ``[H, D]`` and ``[KVH, D]``; None where heads are not normalised.
        qkv: queries, keys and values, in this order; ``gate_up``: the gate, then what it opens for, or what the
            activation is of where there is no gate. The former two are None of a layer that has a feed-forward part
            alone, the latter of one that has none.
        scale: factor on the scores.
        window: positions a token sees, itself the last; None sees all before it.
        ahead: and so many behind it, of those that a batch's ``visible_ends`` let it see; None sees all of those.
        attention_norm, mlp_out_norm: of what both parts make, before it is added.
        norms_rows: the norms of queries and keys span all heads; ``norms_follow``: they come behind the rotation.
        angles: which of a batch's angles heads are rotated by; None for none.
        is_interleaved: see ``kernels.rotary.apply_rotary``.
        softcap, sinks: see ``kernels.paged_attention``; sinks in float32.
        residual_scale: factor on what is added to the stream.
        is_parallel: both parts start from the layer's input; without ``mlp_norm`` from its one norm.
        activation: a place in ``kernels.gated_activation.ACTIVATIONS``.
        gate: position of the gates on the attention output.
        mixer: in the place of attention; ``qkv`` then makes its rows, and the rest of attention counts for nothing.
        experts: beside ``gate_up`` and ``down``, whose result is added, or alone.
        heads: None where they are as the decoder says.
        stores: keys and values; else ``qkv`` makes queries alone, and the cache is that of a layer before.
        values_are_keys: ``qkv`` makes queries and keys, and values are what keys are made of, too.
        value_norm: ``[KVH, D]``; None where values are not normalised.
        embedding_part: behind the feed-forward part; None without.
        out_scale: ``[1]`` float32, of the stream behind the layer; None without.
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
    """All of it.

    Args:
        embeddings: ``[V, hidden size]``; without rows if every batch brings its own.
        token_scale: factor on rows of ``embeddings``.
        stream_scale: factor on what the first layer gets, wherever it is from.
        final_norm: None of a model whose last layer ends with one.
        lm_head: None where normalised rows are wanted in the place of logits.
        logit_scale, logit_softcap: of what the head makes.
        norms_stream: what ``input_norm``, ``mlp_norm`` and ``final_norm`` make is the stream from there on, as it is in
            encoders that normalise behind each addition: their norms are those of the part that follows.
        num_heads, num_kv_heads, head_dim: of layers that do not say them.
        layer_embeddings: what ``embedding_part`` of layers is given; None without.
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

    def heads_of(self, layer: LayerWeights) -> HeadsShape:
        """Those of ``layer``, which is one of ``layers``."""
        return layer.heads or HeadsShape(self.num_heads, self.num_kv_heads, self.head_dim)
