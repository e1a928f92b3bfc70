"""Structure of a decoder as data: everything that the lean path needs besides the weights.

Each difference between current decoder architectures is a field here. Names are those of transformers' modules, as
``get_submodule`` takes them. So a plan holds no tensor, fits the same model loaded again, and can be stored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...kernels.decoder import AttentionGate
from ...kernels.mixers import MixerKind


class NormPlan(msgspec.Struct, frozen=True):
    """A norm over the last dimension: LayerNorm or RMSNorm.

    Args:
        size: length of a row; not every norm has a weight that shows it.
        is_centred: subtract the mean first (LayerNorm); else RMSNorm.
        is_wide: apply the weight in float32 and round once; else round the row before.
        offset: added to the weight; 1 in Gemma, whose weights are near 0.
    """

    name: str
    eps: float
    size: int
    is_centred: bool = False
    is_wide: bool = False
    offset: float = 0.0


class RotationPlan(msgspec.Struct, frozen=True):
    """The rotary embedding of a layer.

    Args:
        source: index into ``DecoderPlan.angles``.
        is_interleaved: rotate pairs of neighbours ``(2 i, 2 i + 1)``; else of halves ``(i, i + R / 2)``.
    """

    source: int
    is_interleaved: bool = False


class AnglesPlan(msgspec.Struct, frozen=True):
    """A call of the model's own module that computes cosines and sines of positions.

    Args:
        arguments, options: positional and keyword arguments after the hidden states and the positions.
        stride: distance between the columns of two pairs.
        repeats: whether columns are repeated; False if there are as many columns as pairs.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    stride: int = 1
    repeats: bool = True


class AttentionPlan(msgspec.Struct, frozen=True, tag=True):
    """The attention of a layer, from its normalised input to the input of its output projection.

    Args:
        qkv: names of the projections: three, or one that computes queries, keys and values in this order; plus one if
            ``gate`` needs it. Two if ``values_are_keys``, and only that of queries if ``source`` is set.
        scale: factor on the scores.
        query_norm, key_norm: None if heads are not normalised.
        norms_rows: each norm spans all heads of a token; else one head.
        norms_follow: norms are applied after the rotation.
        rotation: None in a layer without positions.
        softcap: as in ``paged_attention``.
        sinks: name of the parameter that ``paged_attention`` takes as ``sinks``.
        gate: position of the sigmoid gates on the attention output. ``WITH_QUERY``: after each head's query. Else
            ``qkv`` has a fourth projection, to one gate per element of the output or per head.
        value_norm: norm of each head's values; None for no norm.
        values_are_keys: values are the output of the key projection, before norm and rotation.
        source: index of the layer whose keys and values this layer reads, with the same window; None for its own.
    """

    qkv: tuple[str, ...]
    output: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    norms_rows: bool = False
    norms_follow: bool = False
    rotation: RotationPlan | None = None
    softcap: float | None = None
    sinks: str | None = None
    gate: AttentionGate = AttentionGate.NONE
    value_norm: NormPlan | None = None
    values_are_keys: bool = False
    source: int | None = None


class MixerPlan(msgspec.Struct, frozen=True, tag=True):
    """A recurrent mixer, which keeps a state instead of keys and values, between a layer's norm and its output
    projection.

    Fields from ``values_at`` on are those of ``kernels.mixers.MixerWeights``.

    Args:
        inner: names of the input projections, whose outputs are concatenated to a row.
        convolution: name of the module that has the weights of the convolution.
        decay, step_bias, skip: names of parameters.
        norm: name of the norm after a recurrence.
        by_groups: ``inner`` has two projections. The first computes queries, keys, values and gates group by group, the
            second strengths and steps. Offsets (``*_at``) count as if each part were contiguous, in this order.
    """

    kind: MixerKind
    inner: tuple[str, ...]
    output: str
    convolution: str
    values_at: int
    gate_at: int
    strength_at: int = 0
    step_at: int = 0
    num_heads: int = 0
    num_groups: int = 0
    head_dim: int = 0
    key_dim: int = 0
    decay: str = ""
    step_bias: str = ""
    skip: str = ""
    norm: str = ""
    norm_size: int = 1
    gates_first: bool = False
    eps: float = 0.0
    smallest_step: float = 0.0
    by_groups: bool = False


class RouterPlan(msgspec.Struct, frozen=True):
    """The router of a mixture of experts, as ``kernels.moe.route`` computes it.

    Names are those of parameters or buffers; "" for none.

    Args:
        weight: name of the weight, ``[X, E]``.
        bias: name of the bias of the logits, ``[X]``.
        choice_bias: name of the bias that is added to scores to choose experts, ``[X]``.
        is_wide: logits are computed in float32 and not rounded.
        rounds_weights: expert weights are rounded to the model's dtype.
        norm: norm of the router's input; None for no norm.
        input_scale: name of a vector ``[E]`` that multiplies the input, in addition to ``input_factor``.
        expert_scale: name of a vector ``[X]`` that multiplies the final expert weights.
    """

    weight: str
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"]
    renormalizes: bool
    scale: float = 1.0
    bias: str = ""
    choice_bias: str = ""
    is_wide: bool = False
    rounds_weights: bool = True
    norm: NormPlan | None = None
    input_scale: str = ""
    input_factor: float = 1.0
    expert_scale: str = ""


class ExpertsPlan(msgspec.Struct, frozen=True):
    """A mixture of experts.

    Args:
        name: of the module that holds the tensors of all experts.
        inner, down: names of these tensors. The name of a bias is theirs and ``_bias``.
        is_transposed: the tensors are ``[X, inputs, outputs]``; else ``[X, outputs, inputs]``.
        is_gated: as "gated" of ``FeedForwardPlan``; else as "plain".
        clamp: factor in the sigmoid and limit of a clamped gate, whose rows alternate with the gated ones.
        shared: a dense part whose result is added; None for none.
        shared_gate: name of a layer with one output, whose sigmoid multiplies the shared part; "" for none.
        input_norm: norm of the experts' input, if experts and router read the residual stream instead of the input of
            the dense part.
        out_norm, shared_norm: norms of the outputs of experts and dense part, before they are added.
    """

    name: str
    router: RouterPlan
    inner: str
    down: str
    is_transposed: bool = False
    activation: str = "silu"
    is_gated: bool = True
    clamp: tuple[float, float] | None = None
    shared: FeedForwardPlan | None = None
    shared_gate: str = ""
    input_norm: NormPlan | None = None
    out_norm: NormPlan | None = None
    shared_norm: NormPlan | None = None


class FeedForwardPlan(msgspec.Struct, frozen=True):
    """The feed-forward part of a layer, which computes each token separately.

    Args:
        name: of the model's own module.
        kind: "gated" (an activation times a second projection), "plain" (an activation only), "routed" (experts of an
            ``ExpertsPlan``), "experts", "experts and a shared one", or "own": the model's own code.
        inner: names of the projections before the activation; one if gate and up are fused, or without a gate.
        down: name of the projection after the activation.
        activation: one of ``gated_activation.ACTIVATIONS``.
        beside: for "own", name of a second module with the same input, whose result is added; "" for none. For
            "routed", the module that the plan calls ``shared``.
        experts: for "routed".
    """

    name: str
    kind: str = "own"
    inner: tuple[str, ...] = ()
    down: str = ""
    activation: str = "silu"
    beside: str = ""
    experts: ExpertsPlan | None = None


class EmbeddingPartPlan(msgspec.Struct, frozen=True):
    """Last part of a layer, which adds a gated per-layer embedding of the token (Gemma 4).

    Args:
        gate: name of the projection of the residual stream whose ``activation`` multiplies the embedding.
        output: name of the projection of that product, whose output is added to the stream.
        norm: norm of that output; None for no norm.
    """

    gate: str
    output: str
    activation: str
    norm: NormPlan | None


class LayerEmbeddingsPlan(msgspec.Struct, frozen=True):
    """The per-layer embeddings that ``EmbeddingPartPlan`` adds: ``sum_scale * (norm(projected) + embedded)``.

    Args:
        embedding: name of a second table, with ``size`` numbers per layer; ``embedding_scale`` is its factor.
        projection: name of the projection of the first embedding to as many numbers, times ``projection_scale``.
        norm: of each layer's numbers.
    """

    embedding: str
    projection: str
    norm: NormPlan
    size: int
    embedding_scale: float
    projection_scale: float
    sum_scale: float


class LayerPlan(msgspec.Struct, frozen=True):
    """A layer: its norms, and how it adds to the residual stream.

    Args:
        attention: attention or a mixer. ``attention`` or ``mlp`` is None in a layer that has only one part.
        input_norm, mlp_norm: before attention, and before the feed-forward part.
        attention_norm, mlp_out_norm: of the outputs of both, before they are added.
        is_parallel: both parts read the layer's input. Without a ``mlp_norm`` the feed-forward part has the same input
            as attention.
        residual_scale: factor on each output before it is added.
        embedding_part: after the feed-forward part; None for none.
        out_scale: name of a tensor with one number, which multiplies the stream after the layer; "" for none.
    """

    attention: AttentionPlan | MixerPlan | None
    mlp: FeedForwardPlan | None
    input_norm: NormPlan | None = None
    attention_norm: NormPlan | None = None
    mlp_norm: NormPlan | None = None
    mlp_out_norm: NormPlan | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0
    embedding_part: EmbeddingPartPlan | None = None
    out_scale: str = ""


class DecoderPlan(msgspec.Struct, frozen=True):
    """The whole decoder.

    Args:
        embedding_scale: factor of the embedding's own module on its rows.
        stream_scale: factor of the model on embeddings of any origin.
        logit_scale, logit_softcap: applied to the output of the head; the scale first.
        layer_embeddings: input of the layers' ``embedding_part``; None for none.
        ties_head: the head has the matrix of the embedding.
    """

    embedding: str
    head: str
    norm: NormPlan
    layers: tuple[LayerPlan, ...]
    angles: tuple[AnglesPlan, ...] = ()
    embedding_scale: float = 1.0
    stream_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_embeddings: LayerEmbeddingsPlan | None = None
    ties_head: bool = False
