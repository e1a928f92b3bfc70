"""Mixtures of experts of a decoder, laid out for the processor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KernelInputError
from ..linear import LinearStruct, PackedWeight, pack_weight
from ..native import library
from .norms import NormWeights, address, norm_struct
from .structs import ExpertsStruct

MAX_EXPERTS = 1024


def can_mix_experts(device: torch.device, dtype: torch.dtype, num_experts: int) -> bool:
    """Whether a decoder that runs there could have so many experts in a layer."""
    return device.type == "cpu" and library("run_decoder", dtype) is not None and num_experts <= MAX_EXPERTS


@dataclass(frozen=True)
class ExpertsWeights:
    """Which experts a token goes to, and what they are.

    Args:
        router: ``[X, E]`` float32, and ``router_bias`` ``[X]`` float32 or None, which make the logits.
        choice_bias: ``[X]`` float32, added to scores only where experts are chosen; None without.
        gate_up, down: of each expert, as a layer has them that all tokens go through.
        num_chosen: experts of a token.
        has_sigmoids: scores are the sigmoids of the logits, else their softmax.
        renormalizes: what those chosen count is divided by its sum.
        rounds_logits, rounds_weights: to the model's dtype, which the router's logits, and what experts count, have.
        scale: of what experts count.
        activation, is_gated: as a layer has them.
        clamp: the factor in the sigmoid and the limit of clamped gates, which lie in pairs with what they open for, in
            the place of ``activation``; None without.
        shared_gate: one number, whose sigmoid opens for what the layer's ``gate_up`` and ``down`` make; None opens it.
        input_norm: of what experts are given, which then is the stream, as it is for the router; None where both are
            given what ``gate_up`` is.
        router_norm, input_scale, input_factor: of what the router is given: a normalisation, then ``[E]`` float32 and a
            number by which it is multiplied.
        expert_scale: ``[X]`` float32, of what experts count in the end; None without.
        out_norm, shared_norm: of what experts make, and the layer's ``gate_up`` and ``down``, before they are added.
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
    """``weights`` as the library takes them. Holds what is made for it: a packed router, and lists of addresses.

    Raises:
        KernelInputError: there are more than ``MAX_EXPERTS``, or a token cannot go to so many.
    """

    def __init__(self, weights: ExpertsWeights) -> None:
        num = len(weights.gate_up)
        if not 1 <= weights.num_chosen <= num <= MAX_EXPERTS or len(weights.router) != num:
            raise KernelInputError(
                f"a router of {len(weights.router)} outputs cannot send tokens to {weights.num_chosen} of {num} "
                f"experts; there may be {MAX_EXPERTS}"
            )
        if weights.router.dtype is not torch.float32:
            raise KernelInputError(f"a router must be float32, got {weights.router.dtype}")
        self._router = pack_weight(weights.router, weights.router_bias)
        self._choice_bias = weights.choice_bias
        self._lists = [(LinearStruct * num)(*(each.struct() for each in of)) for of in (weights.gate_up, weights.down)]
        alpha, limit = weights.clamp or (0.0, 0.0)
        self.struct = ExpertsStruct(
            self._router.struct(),
            None if weights.choice_bias is None else weights.choice_bias.data_ptr(),
            *self._lists,
            LinearStruct() if weights.shared_gate is None else weights.shared_gate.struct(),
            *(num, weights.num_chosen, weights.has_sigmoids, weights.renormalizes),
            *(weights.rounds_logits, weights.rounds_weights, weights.activation, weights.is_gated),
            *(weights.scale, alpha, limit),
            *map(norm_struct, (weights.router_norm, weights.input_norm, weights.out_norm, weights.shared_norm)),
            *(address(weights.input_scale), address(weights.expert_scale), weights.input_factor),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)
