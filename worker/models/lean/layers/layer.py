"""One layer of a decoder, in few operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .....kernels.decoder import AttentionGate
from .....kernels.gated_activation import activate
from .....kernels.rms_norm import rms_norm
from ...plan import AttentionPlan, EmbeddingPartPlan, LayerPlan, NormPlan
from .feed_forward import RoutedMlp, make_feed_forward, tensor_of
from .fuse import concatenate, fuse_linear
from .norms import AnyNorm, CentredNorm, Norm, make_norm
from .rotation import rotate

Angles = tuple[Tensor, Tensor]

# In a layer with attention: attend(query_key [T, H + KVH, D], value [T, KVH, D], angles, is_interleaved) -> [T, H, D].
# It rotates, unless there are no angles, then attends. For layers with a mixer see ``mixing.py``.
Attend = Callable[..., Tensor]
# See ``AnyLayer.add_and_project`` and ``AnyLayer.add_and_feed``.
Enter = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]
Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class HeadNorm(nn.Module):
    """A norm of each head separately, with one weight for all heads of a kind or one per head.

    Args:
        kinds: a norm per kind of heads, all of the same form, and the number of these heads.
    """

    def __init__(self, *kinds: tuple[AnyNorm, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(concatenate([_per_head(norm, num) for norm, num in kinds]), requires_grad=False)
        first = kinds[0][0]
        assert isinstance(first, Norm | CentredNorm)
        self.eps = first.eps
        self.is_centred = isinstance(first, CentredNorm)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise heads ``[T, heads, D]``."""
        if self.is_centred:
            wide = heads.float()
            wide = wide - wide.mean(-1, keepdim=True)
            return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(heads.dtype)
        return rms_norm(heads, self.weight, self.eps)


class RowNorm(nn.Module):
    """A norm over all queries of a token, and one over all its keys (OLMo 2)."""

    def __init__(self, query: AnyNorm, key: AnyNorm, num_heads: int) -> None:
        super().__init__()
        self.query, self.key = query, key
        self._num_heads = num_heads

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise heads ``[T, H + KVH, D]``."""
        split = heads.flatten(1).tensor_split([self._num_heads * heads.shape[2]], dim=1)
        normed = [norm(rows) for norm, rows in zip((self.query, self.key), split, strict=True)]
        return torch.cat(normed, dim=1).view(heads.shape)


class AnyLayer(nn.Module):
    """Base of all layers: norms, the feed-forward part, and the sums of both parts.

    Subclasses have ``attend``, and ``o_proj``, the projection of its output.

    Args:
        own: the model of transformers, whose weights the layer takes over.
    """

    o_proj: Any

    def __init__(self, own: nn.Module, plan: LayerPlan, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.input_norm, self.attention_norm, self.mlp_norm, self.mlp_out_norm = (
            _norm_of(own, norm, device)
            for norm in (plan.input_norm, plan.attention_norm, plan.mlp_norm, plan.mlp_out_norm)
        )
        self.mlp = None if plan.mlp is None else make_feed_forward(own, plan.mlp)
        part = plan.embedding_part
        self.embedding_part = None if part is None else EmbeddingPart(own, part, device)
        self.out_scale = _in_float(tensor_of(own, plan.out_scale)) if plan.out_scale else None
        # The functions that ``attend`` and ``transform`` call.
        self.enter: Enter = self.add_and_project
        self.feed: Feed = self.add_and_feed

    @property
    def in_proj(self) -> Any:
        """The projection of the layer's input."""
        raise NotImplementedError

    def attend(
        self, hidden: Tensor, residual: Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Add ``hidden``, the output of the previous layer, to the stream; then attend, or mix tokens by a recurrence.

        Args:
            angles: one pair per ``DecoderPlan.angles``.

        Returns:
            The output, ``[T, inputs of o_proj]``, and the tensors of each token that ``transform`` needs besides.
        """
        raise NotImplementedError

    def transform(self, mixed: Tensor, carried: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute the rest of the layer from the results of ``attend``.

        Returns the addition to the stream that remains, and the stream.
        """
        added = self.attention_norm(self.o_proj(mixed))
        if self.mlp is None:
            return self._scaled(added), carried[0]
        if self.plan.is_parallel:
            residual, normed = carried
            mlp_input = normed if self.plan.mlp_norm is None else self.mlp_norm(residual)
            return self._scaled(added + self.mlp_out_norm(self._feed(mlp_input, residual))), residual
        fed, residual = self.feed(self._scaled(added), carried[0])
        return self._scaled(self.mlp_out_norm(fed)), residual

    def add_and_project(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Add ``hidden`` to the stream; return the projection of the layer's input, and what ``transform`` needs."""
        normed, residual = self.input_norm.add(hidden, residual)
        return self.in_proj(normed), (residual, normed) if self.plan.is_parallel else (residual,)

    def add_and_feed(self, added: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``added`` to the stream; return the output of the feed-forward part, and the stream."""
        normed, residual = self.mlp_norm.add(added, residual)
        return self._feed(normed, residual), residual

    def _feed(self, normed: Tensor, stream: Tensor) -> Tensor:
        assert self.mlp is not None
        return self.mlp(normed, stream) if isinstance(self.mlp, RoutedMlp) else self.mlp(normed)

    def finish(self, added: Tensor, residual: Tensor, embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply the parts after ``transform``; return the addition to the stream that remains, and the stream.

        Args:
            embedding: of this layer, ``[T, size]``; None unless it has a part for it.
        """
        if self.embedding_part is not None and embedding is not None:
            residual = residual + added
            added = self.embedding_part(residual, embedding)
        if self.out_scale is None:
            return added, residual
        return torch.zeros_like(added), (residual + added) * self.out_scale.to(added.dtype)

    def _scaled(self, added: Tensor) -> Tensor:
        scale = self.plan.residual_scale
        return added if scale == 1.0 else added * scale


class EmbeddingPart(nn.Module):
    """The module of an ``EmbeddingPartPlan``."""

    def __init__(self, own: nn.Module, plan: EmbeddingPartPlan, device: torch.device) -> None:
        super().__init__()
        self.plan = plan
        self.gate: Any = own.get_submodule(plan.gate)
        self.output: Any = own.get_submodule(plan.output)
        self.norm = _norm_of(own, plan.norm, device)

    def forward(self, stream: Tensor, embedding: Tensor) -> Tensor:
        """Return the addition to ``stream``, ``[T, hidden size]``."""
        return self.norm(self.output(activate(self.gate(stream), self.plan.activation) * embedding))


class FeedingLayer(AnyLayer):
    """A layer with only a feed-forward part. It mixes no tokens, so the argument ``attend`` is not used."""

    def __init__(self, own: nn.Module, plan: LayerPlan) -> None:
        assert plan.mlp is not None
        super().__init__(own, plan, next(own.get_submodule(plan.mlp.name).parameters()).device)

    def attend(
        self, hidden: Tensor, residual: Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        normed, residual = self.mlp_norm.add(hidden, residual)
        return normed, (residual,)

    def transform(self, mixed: Tensor, carried: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self._scaled(self.mlp_out_norm(self._feed(mixed, carried[0]))), carried[0]


class LeanLayer(AnyLayer):
    """A layer with attention."""

    def __init__(self, own: Any, plan: LayerPlan) -> None:
        attention = plan.attention
        assert isinstance(attention, AttentionPlan)
        qkv: Any = [own.get_submodule(name) for name in attention.qkv]
        device = own.device
        super().__init__(own, plan, device)
        self.attention = attention
        self.head_dim, self.scale = attention.head_dim, attention.scale
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.inner_sizes = [part.out_features for part in qkv]
        self.qkv_proj = fuse_linear(qkv)
        self.o_proj = own.get_submodule(attention.output)
        self.head_norm = _head_norm_of(own, attention, device)
        # Number of key and value heads that the projection computes and the cache stores.
        self.num_own = 0 if attention.source is not None else self.num_kv_heads
        of_values = _norm_of(own, attention.value_norm, device)
        self.value_norm = nn.Identity() if attention.value_norm is None else HeadNorm((of_values, self.num_own))
        self.sinks = None if attention.sinks is None else _in_float(own.get_parameter(attention.sinks))

    @property
    def in_proj(self) -> Any:
        return self.qkv_proj

    def attend(
        self, hidden: Tensor, residual: Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        rows, carried = self.enter(hidden, residual)
        query_key, value, gate = self._heads(rows)
        value = self.value_norm(value)
        rotation = self.attention.rotation
        own_angles = None if rotation is None else angles[rotation.source]
        is_interleaved = rotation is not None and rotation.is_interleaved
        if self.attention.norms_follow and rotation is not None and own_angles is not None:
            query_key, own_angles = self.head_norm(rotate(query_key, *own_angles, rotation)), None
        else:
            query_key = self.head_norm(query_key)
        output = attend(query_key, value, own_angles, is_interleaved).flatten(1)
        return (output if gate is None else output * gate.sigmoid()), carried

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries and keys ``[T, H + KVH, D]``, values ``[T, KVH, D]``, and the gate ``[T, H * D]`` if there is
        one.

        A layer that attends to another's keys and values has only queries.
        """
        gate, kind, dim = None, self.attention.gate, self.head_dim
        if kind == AttentionGate.WITH_QUERY:
            both, rest = rows.unflatten(-1, (-1, dim)).tensor_split([2 * self.num_heads], dim=1)
            key, value = rest.chunk(2, dim=1)
            query, gate = both[:, ::2], both[:, 1::2]
            return torch.cat([query, key], dim=1), value, gate.flatten(1)
        if kind != AttentionGate.NONE:
            rows, gate = rows.tensor_split([(self.num_heads + 2 * self.num_kv_heads) * dim], dim=1)
            gate = gate.repeat_interleave(dim, dim=1) if kind == AttentionGate.PER_HEAD else gate
        heads = rows.unflatten(-1, (-1, dim))
        if self.attention.values_are_keys:
            return heads, heads[:, self.num_heads :].clone(), gate
        query_key, value = heads.split([self.num_heads + self.num_own, self.num_own], dim=1)
        return query_key, value, gate


def _in_float(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float(), requires_grad=False)


def _norm_of(own: nn.Module, plan: NormPlan | None, device: torch.device) -> AnyNorm:
    return make_norm(None if plan is None else own.get_submodule(plan.name), plan, device)


def _head_norm_of(own: nn.Module, plan: AttentionPlan, device: torch.device) -> nn.Module:
    if plan.query_norm is None:
        return nn.Identity()
    query, key = (_norm_of(own, norm, device) for norm in (plan.query_norm, plan.key_norm))
    if plan.norms_rows:
        return RowNorm(query, key, plan.num_heads)
    if plan.key_norm is None:
        return HeadNorm((query, plan.num_heads))
    return HeadNorm((query, plan.num_heads), (key, plan.num_kv_heads))


def _per_head(norm: AnyNorm, num_heads: int) -> Tensor:
    """Return the norm's weight for each of ``num_heads`` heads, ``[num_heads, D]``."""
    assert isinstance(norm, Norm | CentredNorm)
    weight = norm.weight.detach()
    return weight.expand(num_heads, weight.shape[-1])
