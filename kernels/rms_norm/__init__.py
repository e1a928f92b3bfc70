"""Root mean square normalisation, alone and after the addition to the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import REFERENCE, KernelInputError, OnGpu, select
from . import native, reference

_IMPLEMENTATIONS = {
    REFERENCE: reference.rms_norm,
    "cpu": native.rms_norm,
    "cuda": OnGpu(f"{__package__}.gpu", "rms_norm"),
}
_ADD_IMPLEMENTATIONS = {
    REFERENCE: reference.add_rms_norm,
    "cpu": native.add_rms_norm,
    "cuda": OnGpu(f"{__package__}.gpu", "add_rms_norm"),
}


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to a root mean square of one, then by ``weight``.

    The mean and the scaling are in float32. The product with ``weight`` is in the dtype of ``inputs``, or in float32
    for a float32 weight; the result is rounded once then.

    Args:
        inputs: ``[..., E]``, any strides; on a GPU rows above 32,768 use the reference.
        weight: ``[E]``, or ``[N, E]`` for inputs ``[..., N, E]``; dtype of ``inputs``, or float32.
        eps: added to the mean of squares.

    Returns:
        Shape and dtype of ``inputs``, contiguous. A row's bits do not depend on the other rows or their number, given
        the strides.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: memory bound, ``2 * inputs.nbytes``.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    _check_weight(inputs, weight)
    return select(_IMPLEMENTATIONS, inputs.device, inputs.dtype)(inputs, weight, eps)


def add_rms_norm(inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``(rms_norm(inputs + residual), inputs + residual)``; either argument may be overwritten.

    Args:
        inputs: ``[T, E]``. **May be mutated.**
        residual: ``[T, E]``, dtype of ``inputs``. **May be mutated.**
        weight: ``[E]``.

    Returns:
        Both ``[T, E]``. A row's bits do not depend on the other rows or their number.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: memory bound, ``4 * inputs.nbytes``.
    """
    _check_weight(inputs, weight)
    if residual.shape != inputs.shape or residual.dtype != inputs.dtype:
        raise KernelInputError(
            f"residual must be {inputs.dtype} {tuple(inputs.shape)}, got {residual.dtype} {tuple(residual.shape)}"
        )
    return select(_ADD_IMPLEMENTATIONS, inputs.device, inputs.dtype)(inputs, residual, weight, eps)


def _check_weight(inputs: Tensor, weight: Tensor) -> None:
    is_supported = weight.dtype in (inputs.dtype, torch.float32)
    if weight.ndim not in (1, 2) or weight.shape != inputs.shape[-weight.ndim :] or not is_supported:
        raise KernelInputError(
            f"weight must be {inputs.dtype} or float32 [{inputs.shape[-1]}], got {weight.dtype} {tuple(weight.shape)}"
        )
