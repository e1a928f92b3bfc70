"""How a decoder is made, as data: what the lean path needs to know beside the weights.

Every place where decoders of today differ from each other is a field here. Names are those of transformers' modules, as
``get_submodule`` takes them, so a plan holds no tensor, and serves the same model loaded again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ...kernels.decoder import AttentionGate
from ...kernels.mixers import MixerKind


@dataclass(frozen=True)
class NormPlan:
    """A normalisation of rows.

    Args:
        is_centred: the mean is taken off first (LayerNorm); else by the root mean square alone.
        is_wide: the weight is applied in float32, and the result rounded once. Else the row is rounded before.
        offset: added to the weight: 1 in Gemma, whose weights are near 0.
        size: of a row; a norm need not have a weight that would tell.
    """

    name: str
    eps: float
    size: int
    is_centred: bool = False
    is_wide: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class RotationPlan:
    """The rotary embedding of a layer.

    Args:
        source: which of ``DecoderPlan.angles``.
        is_interleaved: pairs are neighbours ``(2 i, 2 i + 1)``; else halves ``(i, i + R / 2)``.
    """

    source: int
    is_interleaved: bool = False


@dataclass(frozen=True)
class AnglesPlan:
    """A call by which the model makes cosines and sines of positions.

    Args:
        arguments, options: of the call, behind the hidden states and the positions.
        stride, repeats: the angle of the i-th pair is every ``stride``-th column; ``repeats`` is False where there are
            as many columns as pairs.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    stride: int = 1
    repeats: bool = True


@dataclass(frozen=True)
class AttentionPlan:
    """What happens between a layer's normalised input and what its output projection is given.

    Args:
        qkv: names of the projections: three, and perhaps one of gates, or one that makes queries, keys and values in
            this order. Two where ``values_are_keys``, one of queries where keys and values have a ``source``.
        scale: factor on the scores.
        query_norm, key_norm: None where heads are not normalised.
        norms_rows: they span all heads of a token; else each head.
        norms_follow: they come behind the rotation.
        rotation: None in a layer without positions.
        softcap, sinks: as ``paged_attention`` takes them, the latter by name.
        gate: position of the sigmoid gates on the attention output. ``WITH_QUERY``: after each head's query. Else
            ``qkv`` has a fourth projection, to one gate per element of the output or per head.
        value_norm: of each head's values; None where they are not normalised.
        values_are_keys: values are what the projection of keys makes, before that is normalised and rotated.
        source: the layer whose keys and values are attended to; None for its own. It sees as far.
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


@dataclass(frozen=True)
class MixerPlan:
    """What a layer does that keeps a state in the place of keys and values, between its norm and its output projection.

    Fields from ``values_at`` on are those of ``kernels.mixers.MixerWeights``.

    Args:
        inner: names of the projections, whose outputs side by side are a row.
        convolution: name of the module that has its weights.
        decay, step_bias, skip: names of parameters.
        norm: name of the normalisation behind a recurrence.
        by_groups: ``inner`` are two, of which the first makes queries, keys, values and gates of one group after the
            other, and the second their strengths and steps. Places count as if the parts lay apart, in this order.
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


@dataclass(frozen=True)
class RouterPlan:
    """By which weights and rules a token goes to its experts, as ``kernels.moe.route`` does.

    Args:
        weight: name of ``[X, E]``; ``bias`` and ``choice_bias``, ``[X]``: of its logits, and of scores where experts
            are chosen. Names of parameters or buffers, empty without.
        is_wide: logits are computed in float32, and not rounded.
        rounds_weights: what experts count is rounded to the model's dtype.
        norm: of what it is given; ``input_scale``: name of ``[E]`` by which that is multiplied, times ``input_factor``.
        expert_scale: name of ``[X]`` by which what experts count is multiplied in the end; empty without.
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


@dataclass(frozen=True)
class ExpertsPlan:
    """A mixture of experts whose tokens are sent by a ``RouterPlan``.

    Args:
        name: of the module that holds the experts, in tensors of all of them.
        inner, down: names of these tensors; where they have a bias, its name is theirs and ``_bias``.
        is_transposed: they are ``[X, inputs, outputs]``; else ``[X, outputs, inputs]``.
        is_gated: as for "gated" of ``FeedForwardPlan``; else as for "plain".
        clamp: factor in the sigmoid and limit of a clamped gate, which lies in pairs with what it opens for.
        shared: a dense part beside them, whose result is added; None without.
        shared_gate: name of a layer with one output, whose sigmoid opens for that; empty without.
        input_norm: where experts and router start from the stream, and not from what the dense part is given: of what
            experts are given.
        out_norm, shared_norm: of what experts and dense part make, before both are added.
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


@dataclass(frozen=True)
class FeedForwardPlan:
    """What a layer does to each token by itself.

    Args:
        name: of the model's own module.
        kind: "gated" (an activation times what it lets through), "plain" (an activation alone), "routed" (experts of an
            ``ExpertsPlan``), "experts", "experts and a shared one", or "own": the model's own code.
        inner: names of the projections before the activation; one where gate and up are fused, or there is no gate.
        down: name of the projection behind it.
        activation: one of ``gated_activation.ACTIVATIONS``.
        beside: name of a second module of "own", of the same input, whose result is added; empty without. Of "routed"
            experts it is what the plan calls ``shared``.
        experts: of "routed".
    """

    name: str
    kind: str = "own"
    inner: tuple[str, ...] = ()
    down: str = ""
    activation: str = "silu"
    beside: str = ""
    experts: ExpertsPlan | None = None


@dataclass(frozen=True)
class EmbeddingPartPlan:
    """A last part of a layer, which lets the layer's own embedding of a token in (Gemma 4).

    Args:
        gate: name of the projection from the stream whose ``activation`` opens for the embedding.
        output: name of the projection of what comes of that, which is added to the stream.
        norm: of what is added; None without.
    """

    gate: str
    output: str
    activation: str
    norm: NormPlan | None


@dataclass(frozen=True)
class LayerEmbeddingsPlan:
    """How the embeddings are made that layers let in: ``sum_scale * (norm(projected) + embedded)``.

    Args:
        embedding: name of a second table, of ``size`` numbers for each layer; ``embedding_scale`` is its own.
        projection: name of the projection of the first embedding to as many, times ``projection_scale``.
        norm: of each layer's.
    """

    embedding: str
    projection: str
    norm: NormPlan
    size: int
    embedding_scale: float
    projection_scale: float
    sum_scale: float


@dataclass(frozen=True)
class LayerPlan:
    """One layer: where it normalises, and how it adds to the stream.

    Args:
        attention: or what mixes tokens in its place. Of a layer that has one part alone, ``attention`` or ``mlp`` is
            None.
        input_norm, mlp_norm: before attention, and before the feed-forward part.
        attention_norm, mlp_out_norm: of what both make, before it is added.
        is_parallel: both start from the layer's input; without a ``mlp_norm`` of its own the feed-forward part gets
            what attention gets.
        residual_scale: what is added is multiplied by it.
        embedding_part: behind the feed-forward part; None without.
        out_scale: name of a tensor of one number, by which the stream behind the layer is multiplied; empty without.
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


@dataclass(frozen=True)
class DecoderPlan:
    """All of it.

    Args:
        embedding_scale: by which the embedding's own module multiplies its rows.
        stream_scale: by which the model multiplies embeddings, wherever they are from.
        logit_scale, logit_softcap: of what the head makes; the scale first.
        layer_embeddings: what ``embedding_part`` of layers lets in; None without.
    """

    embedding: str
    head: str
    norm: NormPlan
    layers: tuple[LayerPlan, ...]
    angles: tuple[AnglesPlan, ...] = field(default_factory=tuple)
    embedding_scale: float = 1.0
    stream_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_embeddings: LayerEmbeddingsPlan | None = None
