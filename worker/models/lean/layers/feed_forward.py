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
from ...parallel.groups import SumOverRanks
from ...placing.file_numbers import matrices_of
from ...plan import ExpertsPlan, FeedForwardPlan, NormPlan, RouterPlan
from .fuse import fuse_linear
from .norms import AnyNorm, make_norm


class GatedMlp(nn.Module):
    """A dense feed-forward part with gate and up projection in one, or without a gate.

    Args:
        inner: projections before the activation: gate and up, both in one, or one without a gate.
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
    """Return the "gated" or "plain" part of ``plan``, on the weights of ``own``, the whole model."""
    inner: Any = [own.get_submodule(name) for name in plan.inner]
    down: Any = own.get_submodule(plan.down)
    return GatedMlp(inner, down, plan.activation, is_gated=plan.kind == "gated")


class Router(nn.Module):
    """Chooses the experts of tokens. It stays in float32, because rounding would send some tokens to other experts."""

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
        """Return weights and ids of the experts for ``hidden [T, E]``, ``[T, J]`` each."""
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
    """The module of an ``ExpertsPlan``. Its linear layers are views of the model's tensors until they are packed.

    Args:
        own: the whole model.
        shared: the shared dense part; None for none.
    """

    def __init__(self, own: nn.Module, plan: ExpertsPlan, shared: GatedMlp | None) -> None:
        super().__init__()
        self.plan = plan
        experts: Any = own.get_submodule(plan.name)
        self.router = Router(own, plan.router)
        self.gate_up = _linears_of(experts, plan.inner, is_transposed=plan.is_transposed)
        self.down = _linears_of(experts, plan.down, is_transposed=plan.is_transposed)
        self.shared = shared
        self.shared_gate = own.get_submodule(plan.shared_gate) if plan.shared_gate else None
        self.input_norm, self.out_norm, self.shared_norm = (
            _norm_of(own, norm, self.router.weight.device)
            for norm in (plan.input_norm, plan.out_norm, plan.shared_norm)
        )

    def forward(self, hidden: Tensor, stream: Tensor) -> Tensor:
        """Compute rows ``[T, E]``.

        Args:
            hidden: input of the dense part.
            stream: the residual stream that ``hidden`` was computed from.
        """
        dense_input, hidden = hidden, hidden if self.plan.input_norm is None else self.input_norm(stream)
        weights, ids = self.router(dense_input if self.plan.input_norm is None else stream)
        output = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, places = torch.where(ids == expert)
            inner = activate_experts(self.plan, self.gate_up[expert](hidden[rows]))
            output[rows] += weights[rows, places, None].float() * self.down[expert](inner).float()
        output = self.out_norm(output.to(hidden.dtype))
        if self.shared is None:
            return output
        shared = self.shared_norm(self.shared(dense_input))
        return output + (shared if self.shared_gate is None else self.shared_gate(dense_input).sigmoid() * shared)


def activate_experts(plan: ExpertsPlan, rows: Tensor) -> Tensor:
    """Apply an expert's activation to the output of its first product; return the input of its last."""
    if plan.clamp is not None:
        alpha, limit = plan.clamp
        gate, up = rows[:, ::2].clamp(max=limit), rows[:, 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return activate_and_mul(rows, plan.activation) if plan.is_gated else activate(rows, plan.activation)


def _norm_of(own: nn.Module, plan: NormPlan | None, device: torch.device) -> AnyNorm:
    return make_norm(None if plan is None else own.get_submodule(plan.name), plan, device)


def tensor_of(own: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of that name."""
    holder, _, last = name.rpartition(".")
    return getattr(own.get_submodule(holder), last)


def _in_float(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float().reshape(tensor.shape if tensor.ndim == 2 and len(tensor) > 1 else -1))


def _linears_of(experts: Any, name: str, *, is_transposed: bool) -> nn.ModuleList:
    weights = matrices_of(getattr(experts, name), is_transposed=is_transposed)
    biases = getattr(experts, f"{name}_bias", None)
    return nn.ModuleList(
        _linear(weight, None if biases is None else biases.detach()[expert]) for expert, weight in enumerate(weights)
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class OwnMlp(nn.Module):
    """The model's own feed-forward part: a mixture of experts, which transformers stores fused.

    Args:
        beside: a second module with the same input, whose result is added; None for none.
    """

    def __init__(self, own: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.own = own
        self.beside = beside

    def forward(self, hidden: Tensor) -> Tensor:
        output = _first_of(self.own(hidden[None]))
        return output if self.beside is None else output + _first_of(self.beside(hidden[None]))


def _first_of(results: Any) -> Tensor:
    """Return ``[T, E]`` of ``[1, T, E]``, or of the first of several results."""
    return (results[0] if isinstance(results, tuple) else results)[0]


class SparseMlp(nn.Module):
    """A mixture of experts by our kernels, on the weights of the model's own."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.router_weight = own.gate.weight
        self.gate_up_proj = own.experts.gate_up_proj
        self.down_proj = own.experts.down_proj
        self.num_chosen = own.gate.top_k
        # Mixtral always renormalises, and is the only one that keeps expert weights in float32.
        self.renormalizes = getattr(own.gate, "norm_topk_prob", True)
        self.weights_dtype = own.gate.weight.dtype if hasattr(own.gate, "norm_topk_prob") else torch.float32

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.router_weight)
        weights, ids = moe.route(logits, self.num_chosen, renormalizes=self.renormalizes)
        return moe.experts(hidden, self.gate_up_proj, self.down_proj, weights.to(self.weights_dtype), ids)


class SharedExpertMlp(nn.Module):
    """A mixture of experts and a gated expert for all tokens (Qwen2)."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.routed = SparseMlp(own)
        shared = own.shared_expert
        self.shared = GatedMlp([shared.gate_proj, shared.up_proj], shared.down_proj, "silu")
        self.gate = own.shared_expert_gate

    def forward(self, hidden: Tensor) -> Tensor:
        return self.routed(hidden) + torch.sigmoid(self.gate(hidden)) * self.shared(hidden)


def make_feed_forward(own: nn.Module, plan: FeedForwardPlan) -> nn.Module:
    """Return the feed-forward part of ``plan``, on the weights of ``own``, the whole model."""
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
