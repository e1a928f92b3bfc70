"""Activations of feed-forward layers: gated as in Llama and Gemma, and plain."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import native, reference

_SILU_IMPLEMENTATIONS = {
    REFERENCE: reference.silu_and_mul,
    "cpu": native.silu_and_mul,
    "cuda": OnGpu(f"{__package__}.gpu", "silu_and_mul"),
}
_GELU_IMPLEMENTATIONS = {REFERENCE: reference.gelu_and_mul, "cuda": OnGpu(f"{__package__}.gpu", "gelu_and_mul")}

# In the order of Activation in kernels/native/decoder/layer_switches.h.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` of a fused projection: see ``silu_and_mul``.

    Args:
        activation: one of ``ACTIVATIONS``.
    """
    if activation == "silu":
        return silu_and_mul(gate_up)
    if activation == "relu2":
        _check_halves(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, activation).mul_(up)
    return gelu_and_mul(gate_up, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate(rows: Tensor, activation: str) -> Tensor:
    """Return ``activation(rows)``.

    Args:
        activation: one of ``ACTIVATIONS``; "relu2" is the square of the ReLU.
    """
    if activation == "silu":
        return F.silu(rows)
    if activation == "relu2":
        return F.relu(rows).square()
    return F.gelu(rows, approximate="tanh" if activation == "gelu_tanh" else "none")


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of a fused projection.

    Args:
        gate_up: ``[T, 2 * I]``, any strides, first the gates, then the values that they multiply. **May be mutated.**

    Returns:
        ``[T, I]`` in the dtype of ``gate_up``. A row's bits do not depend on the other rows.

    Raises:
        KernelInputError: the last axis is not even.

    Cost: memory bound, ``3 * T * I * itemsize`` bytes.
    Source: Shazeer 2020 (arXiv:2002.05202), SwiGLU.
    """
    _check_halves(gate_up)
    return select(_SILU_IMPLEMENTATIONS, gate_up.device, gate_up.dtype)(gate_up)


def gelu_and_mul(gate_up: Tensor, *, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) * up`` of a fused projection.

    Args:
        gate_up: ``[T, 2 * I]``, any strides, first the gates, then the values that they multiply. **May be mutated.**
        approximate: as in ``torch.nn.functional.gelu``: "none" for the form with erf, "tanh" for Gemma's.

    Returns:
        ``[T, I]`` in the dtype of ``gate_up``. A row's bits do not depend on the other rows.

    Raises:
        KernelInputError: the last axis is not even, or ``approximate`` is unknown.

    Cost: memory bound, ``3 * T * I * itemsize`` bytes.
    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415); Shazeer 2020 (arXiv:2002.05202), GEGLU.
    """
    _check_halves(gate_up)
    if approximate not in ("none", "tanh"):
        raise KernelInputError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return select(_GELU_IMPLEMENTATIONS, gate_up.device, gate_up.dtype)(gate_up, approximate)


def _check_halves(gate_up: Tensor) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise KernelInputError(f"gate_up must be [T, 2 * I], got {tuple(gate_up.shape)}")
