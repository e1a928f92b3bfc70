"""The feed-forward part of a layer: dense, or a mixture of experts.

For the compiled decoder a mixture of experts has a linear layer for each product of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....kernels import moe
from .....kernels.gated_activation import activate, activate_and_mul
from ...parallel.summed import SumOverRanks
from ...plan import ExpertsPlan, FeedForwardPlan, NormPlan, RouterPlan
from .fuse import fuse_linear
from .norms import AnyNorm, make_norm


class GatedMlp(nn.Module):
    """A dense feed-forward layer with gate and up projection in one, or without a gate.

    Args:
        inner: projections before the activation: gate and up, or one in which both are, or one without a gate.
    """

    def __init__(self, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, *, is_gated: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = fuse_linear(inner)
        self.down_proj = down
        self.activation = activation
        self.is_gated = is_gated
        self._activate = partial(activate_and_mul if is_gated else activate, activation=activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self._activate(self.gate_up_proj(hidden)))


def make_dense(own: nn.Module, plan: FeedForwardPlan) -> GatedMlp:
    """The "gated" or "plain" part that ``plan`` says, on the weights of ``own``, the whole model."""
    inner: Any = [own.get_submodule(name) for name in plan.inner]
    down: Any = own.get_submodule(plan.down)
    return GatedMlp(inner, down, plan.activation, is_gated=plan.kind == "gated")


class Router(nn.Module):
    """Sends tokens to experts. It stays float32: rounded it would send some to others."""

    def __init__(self, own: nn.Module, plan: RouterPlan) -> None:
        super().__init__()
        self.plan = plan
        self.weight = _in_float(tensor_of(own, plan.weight))
        self.bias = _in_float(tensor_of(own, plan.bias)) if plan.bias else None
        self.choice_bias = _in_float(tensor_of(own, plan.choice_bias)) if plan.choice_bias else None
        self.norm = _norm_of(own, plan.norm, self.weight.device)
        self.input_scale = _in_float(tensor_of(own, plan.input_scale)) if plan.input_scale else None
        self.expert_scale = _in_float(tensor_of(own, plan.expert_scale)) if plan.expert_scale else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What experts count for ``hidden [T, E]``, and which they are, ``[T, J]`` each."""
        plan = self.plan
        hidden = self.norm(hidden)
        if self.input_scale is not None:
            hidden = hidden * self.input_scale.to(hidden.dtype) * plan.input_factor
        logits = F.linear(hidden.float(), self.weight, self.bias)
        weights, ids = moe.route(
            logits if plan.is_wide else logits.to(hidden.dtype),
            plan.num_chosen,
            scoring=plan.scoring,
            renormalizes=plan.renormalizes,
            bias=self.choice_bias,
            scale=plan.scale,
        )
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[ids]
        return weights.to(hidden.dtype) if plan.rounds_weights else weights, ids


class RoutedMlp(nn.Module):
    """See ``ExpertsPlan``. The layers of experts are views of the model's tensors, until they are packed.

    Args:
        own: the whole model.
        shared: the dense part beside the experts.
    """

    def __init__(self, own: nn.Module, plan: ExpertsPlan, shared: GatedMlp | None) -> None:
        super().__init__()
        self.plan = plan
        held: Any = own.get_submodule(plan.name)
        self.router = Router(own, plan.router)
        self.gate_up = _linears_of(held, plan.inner, is_transposed=plan.is_transposed)
        self.down = _linears_of(held, plan.down, is_transposed=plan.is_transposed)
        self.shared = shared
        self.shared_gate = own.get_submodule(plan.shared_gate) if plan.shared_gate else None
        self.input_norm, self.out_norm, self.shared_norm = (
            _norm_of(own, norm, self.router.weight.device)
            for norm in (plan.input_norm, plan.out_norm, plan.shared_norm)
        )

    def forward(self, hidden: Tensor, stream: Tensor) -> Tensor:
        """Of rows ``[T, E]`` that the dense part is given, and the stream that they were made of."""
        given, hidden = hidden, hidden if self.plan.input_norm is None else self.input_norm(stream)
        weights, ids = self.router(given if self.plan.input_norm is None else stream)
        made = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, places = torch.where(ids == expert)
            inner = activate_experts(self.plan, self.gate_up[expert](hidden[rows]))
            made[rows] += weights[rows, places, None].float() * self.down[expert](inner).float()
        made = self.out_norm(made.to(hidden.dtype))
        if self.shared is None:
            return made
        beside = self.shared_norm(self.shared(given))
        return made + (beside if self.shared_gate is None else self.shared_gate(given).sigmoid() * beside)


def activate_experts(plan: ExpertsPlan, rows: Tensor) -> Tensor:
    """What the products of an expert with its last weight are of."""
    if plan.clamp is not None:
        alpha, limit = plan.clamp
        gate, up = rows[:, ::2].clamp(max=limit), rows[:, 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return activate_and_mul(rows, plan.activation) if plan.is_gated else activate(rows, plan.activation)


def _norm_of(own: nn.Module, plan: NormPlan | None, device: torch.device) -> AnyNorm:
    return make_norm(None if plan is None else own.get_submodule(plan.name), plan, device)


def tensor_of(own: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    holder, _, last = name.rpartition(".")
    return getattr(own.get_submodule(holder), last)


def _in_float(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float().reshape(tensor.shape if tensor.ndim == 2 and len(tensor) > 1 else -1))


def _linears_of(held: Any, name: str, *, is_transposed: bool) -> nn.ModuleList:
    weights, biases = getattr(held, name).detach(), getattr(held, f"{name}_bias", None)
    return nn.ModuleList(
        _linear(weight.T if is_transposed else weight, None if biases is None else biases.detach()[expert])
        for expert, weight in enumerate(weights)
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


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
    if plan.experts is not None and not isinstance(module, SumOverRanks):
        shared = plan.experts.shared
        return RoutedMlp(own, plan.experts, None if shared is None else make_dense(own, shared))
    if plan.beside:
        return OwnMlp(module, own.get_submodule(plan.beside))
    kinds = {"experts": SparseMlp, "experts and a shared one": SharedExpertMlp}
    if isinstance(module, SumOverRanks):
        return SumOverRanks(kinds.get(plan.kind, OwnMlp)(module.inner), module.groups)
    return kinds.get(plan.kind, OwnMlp)(module)
