"""Puts weights as they lie in memory, packed or not, into a module that has them plain."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..packed_linear import PackedLinear


def put_weight(place: nn.Module, name: str, tensor: Tensor) -> None:
    """Let ``name`` of ``place`` be ``tensor``, which is not copied.

    Raises:
        ModelLoadError: ``place`` has nothing of that name and shape.
    """
    former = place._parameters.get(name)
    if former is None or former.shape != tensor.shape:
        there = "none" if former is None else f"{tuple(former.shape)}"
        raise ModelLoadError(f"{type(place).__name__}.{name} is {tuple(tensor.shape)} in memory, {there} in the model")
    place._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)


def put_linear(linear: nn.Module, place: nn.Module) -> None:
    """Let the linear layer ``place`` have the weight and the bias of ``linear``, unpacked."""
    put_weight(place, "weight", cast(Any, linear).weight)
    bias = cast(Any, linear).bias
    if place._parameters.get("bias") is not None:
        put_weight(place, "bias", bias)


def put_modules(network: nn.Module, place: nn.Module) -> None:
    """Let ``place`` and what is in it have the weights and the kept buffers of ``network``, of the same names."""
    for name, part in network.named_modules():
        own = place.get_submodule(name)
        if isinstance(part, PackedLinear):
            put_linear(part, own)
            continue
        for key, value in part._parameters.items():
            if value is not None:
                put_weight(own, key, value)
        for key in part._buffers.keys() - part._non_persistent_buffers_set:
            own._buffers[key] = part._buffers[key]
