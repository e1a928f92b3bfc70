"""A mixture of experts as the compiled decoder takes it: a linear layer for each product of each expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels import moe
from ....kernels.gated_activation import activate, activate_and_mul
from .gated_mlp import GatedMlp
from .norms import AnyNorm, make_norm
from .plan import ExpertsPlan, NormPlan, RouterPlan


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
