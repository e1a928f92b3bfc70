"""What a layer does to each token by itself: dense, or a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels import moe
from ..parallel.summed import Summed
from .gated_mlp import GatedMlp, make_dense
from .plan import FeedForwardPlan
from .routed import RoutedMlp


class OwnMlp(nn.Module):
    """The model's own feed-forward part: a mixture of experts, whose experts transformers holds fused.

    Args:
        beside: a second module of the same input, whose result is added; None without.
    """

    def __init__(self, own: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.own = own
        self.beside = beside

    def forward(self, hidden: Tensor) -> Tensor:
        made = _first_of(self.own(hidden[None]))
        return made if self.beside is None else made + _first_of(self.beside(hidden[None]))


def _first_of(results: Any) -> Tensor:
    """Of ``[1, T, E]``, or of several results the first, ``[T, E]``."""
    return (results[0] if isinstance(results, tuple) else results)[0]


class SparseMlp(nn.Module):
    """A mixture of experts by our own kernels, on the weights of the model's."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.router_weight = own.gate.weight
        self.gate_up_proj = own.experts.gate_up_proj
        self.down_proj = own.experts.down_proj
        self.num_chosen = own.gate.top_k
        # Mixtral always renormalises, and is the one that keeps what its experts count in float32.
        self.renormalizes = getattr(own.gate, "norm_topk_prob", True)
        self.weights_dtype = own.gate.weight.dtype if hasattr(own.gate, "norm_topk_prob") else torch.float32

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.router_weight)
        weights, ids = moe.route(logits, self.num_chosen, renormalizes=self.renormalizes)
        return moe.experts(hidden, self.gate_up_proj, self.down_proj, weights.to(self.weights_dtype), ids)


class SharedExpertMlp(nn.Module):
    """A mixture of experts beside one expert that all tokens go to, by a gate (Qwen2)."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.routed = SparseMlp(own)
        shared = own.shared_expert
        self.shared = GatedMlp([shared.gate_proj, shared.up_proj], shared.down_proj, "silu")
        self.gate = own.shared_expert_gate

    def forward(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden) + torch.sigmoid(self.gate(hidden)) * self.shared(hidden)


def make_feed_forward(own: nn.Module, plan: FeedForwardPlan) -> nn.Module:
    """The feed-forward part that ``plan`` says, on the weights of ``own``, the whole model."""
    module = own.get_submodule(plan.name)
    if plan.kind in ("gated", "plain"):
        return make_dense(own, plan)
    if plan.experts is not None and not isinstance(module, Summed):
        shared = plan.experts.shared
        return RoutedMlp(own, plan.experts, None if shared is None else make_dense(own, shared))
    if plan.beside:
        return OwnMlp(module, own.get_submodule(plan.beside))
    kinds = {"experts": SparseMlp, "experts and a shared one": SharedExpertMlp}
    if isinstance(module, Summed):
        return Summed(kinds.get(plan.kind, OwnMlp)(module.inner), module.groups)
    return kinds.get(plan.kind, OwnMlp)(module)
