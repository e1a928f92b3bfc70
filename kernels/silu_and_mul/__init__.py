"""The gated activation of Llama-like feed-forward layers."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import REFERENCE, select
from ..errors import KernelInputError
from . import native, reference

_IMPLEMENTATIONS = {REFERENCE: reference.silu_and_mul, "cpu": native.silu_and_mul}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of a fused projection.

    Args:
        gate_up: ``[T, 2 * I]``, first the gate, then what it lets through. **May be mutated.**

    Returns:
        ``[T, I]`` in the dtype of ``gate_up``.

    Raises:
        KernelInputError: the last axis has no two halves.

    Cost: memory bound, ``3 * T * I * itemsize`` bytes.
    Source: Shazeer 2020 (arXiv:2002.05202).
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise KernelInputError(f"gate_up must be [T, 2 * I], got {tuple(gate_up.shape)}")
    return select(_IMPLEMENTATIONS, gate_up.device, gate_up.dtype)(gate_up)
