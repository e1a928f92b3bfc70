"""Mixtures of experts of a decoder, in the layout of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import KernelInputError
from ..linear import LinearStruct, PackedWeight, pack_weight
from ..native import library
from .structs import ExpertsStruct, NormWeights, address, norm_struct

MAX_EXPERTS = 1024


def can_mix_experts(device: torch.device, dtype: torch.dtype, num_experts: int) -> bool:
    """Return whether a decoder on ``device`` can have this many experts in a layer."""
    return device.type == "cpu" and library("run_decoder", dtype) is not None and num_experts <= MAX_EXPERTS


@dataclass(frozen=True)
class ExpertsWeights:
    """Router and experts of a layer.

    Args:
        router: ``[X, E]`` float32, projects a token to the logits of its experts.
        router_bias: ``[X]`` float32, bias of the router; None without.
        choice_bias: ``[X]`` float32, added to scores to choose experts, but not to their weights; None without.
        gate_up, down: projections of each expert, as those of a dense MLP.
        num_chosen: experts per token.
        has_sigmoids: scores are the sigmoids of the logits, else their softmax.
        renormalizes: divide the weights of the chosen experts by their sum.
        rounds_logits, rounds_weights: round the router's logits, and the experts' weights, to the model's dtype.
        scale: factor on the experts' weights.
        activation, is_gated: as in ``LayerWeights``.
        clamp: factor in the sigmoid and limit of clamped gates, which replace ``activation``; gate and up are then
            interleaved. None without.
        shared_gate: projection to one value, whose sigmoid gates the output of the layer's dense MLP; None for no gate.
        input_norm: norm of the experts' input. With it, experts and router read the residual stream; None if both read
            the input of the dense MLP.
        router_norm, input_scale, input_factor: norm of the router's input, then factors ``[E]`` float32 and a number.
        expert_scale: ``[X]`` float32, final factor on the experts' weights; None without.
        out_norm, shared_norm: norms of the outputs of the experts and of the dense MLP, before they are added.
    """

    router: Tensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    num_chosen: int
    has_sigmoids: bool
    renormalizes: bool
    rounds_logits: bool
    rounds_weights: bool
    scale: float
    activation: int
    is_gated: bool
    clamp: tuple[float, float] | None = None
    shared_gate: PackedWeight | None = None
    input_norm: NormWeights | None = None
    router_norm: NormWeights | None = None
    input_scale: Tensor | None = None
    input_factor: float = 1.0
    expert_scale: Tensor | None = None
    out_norm: NormWeights | None = None
    shared_norm: NormWeights | None = None


class ExpertsHolder:
    """Struct of ``weights`` for the library, with the packed router and the lists of experts that it points to.

    Raises:
        KernelInputError: there are more than ``MAX_EXPERTS`` experts, or fewer than a token needs.
    """

    def __init__(self, weights: ExpertsWeights) -> None:
        num = len(weights.gate_up)
        if not 1 <= weights.num_chosen <= num <= MAX_EXPERTS or len(weights.router) != num:
            raise KernelInputError(
                f"num_chosen must be 1 to {num} of at most {MAX_EXPERTS} experts, with as many router outputs, got "
                f"{weights.num_chosen} and {len(weights.router)} outputs"
            )
        if weights.router.dtype is not torch.float32:
            raise KernelInputError(f"a router must be float32, got {weights.router.dtype}")
        self._router = pack_weight(weights.router, weights.router_bias)
        self._choice_bias = weights.choice_bias
        self._gate_up, self._down = (
            (LinearStruct * num)(*(expert.struct() for expert in experts))
            for experts in (weights.gate_up, weights.down)
        )
        alpha, limit = weights.clamp or (0.0, 0.0)
        self.struct = ExpertsStruct(
            router=self._router.struct(),
            choice_bias=address(weights.choice_bias),
            gate_up=self._gate_up,
            down=self._down,
            shared_gate=LinearStruct() if weights.shared_gate is None else weights.shared_gate.struct(),
            num_experts=num,
            num_chosen=weights.num_chosen,
            has_sigmoids=weights.has_sigmoids,
            renormalizes=weights.renormalizes,
            rounds_logits=weights.rounds_logits,
            rounds_weights=weights.rounds_weights,
            activation=weights.activation,
            is_gated=weights.is_gated,
            scale=weights.scale,
            alpha=alpha,
            limit=limit,
            router_norm=norm_struct(weights.router_norm),
            input_norm=norm_struct(weights.input_norm),
            out_norm=norm_struct(weights.out_norm),
            shared_norm=norm_struct(weights.shared_norm),
            input_scale=address(weights.input_scale),
            expert_scale=address(weights.expert_scale),
            input_factor=weights.input_factor,
        )

    @property
    def address(self) -> int:
        """Address of the struct."""
        return ctypes.addressof(self.struct)
