"""The products at the entry of a layer's parts: the sum with the residual stream, its norm and a linear layer.

Letters: ``E`` inputs and ``N`` outputs of the linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import AUTO, REFERENCE, KernelInputError, OnGpu, select
from . import reference

# Of float16 the product with the norm's weight, which comes before the norm's own factor, may exceed the largest.
DTYPES = (torch.float32, torch.bfloat16)
# Most rows of the kernel. It computes this many at once, as the tensor cores do; more read weights better by tiles.
MAX_ROWS = 16
GATES = ("silu", "gelu_tanh", "gelu")

_IMPLEMENTATIONS = {
    REFERENCE: reference.normed_linear,
    "cuda": OnGpu(f"{__package__}.gpu", "normed_linear", DTYPES),
}


def normed_linear(
    hidden: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Return ``linear(rms_norm(hidden + residual))``, or the gated activation of it, and the sum.

    Args:
        hidden: ``[T, E]``. **May be mutated.**
        residual: ``[T, E]``, dtype of ``hidden``. **May be mutated.**
        norm_weight: ``[E]``, dtype of ``hidden``, or float32.
        eps: added to the mean of squares.
        weight: ``[N, E]``, dtype of ``hidden``, contiguous; for a gate ``[2 * N, E]``, first the gates.
        bias: ``[N]``, or ``[2 * N]`` for a gate; None for none.
        activation: one of ``GATES``, to return ``activation(gate) * up``; None for none.
        backend: ``AUTO``, or one of ``dispatch.BACKENDS``.

    Returns:
        ``[T, N]`` and ``[T, E]`` in the dtype of ``hidden``. Up to ``MAX_ROWS`` rows, the kernel sums in float32 and
        rounds the norm with its weight, and the result, once each; the bits of a row do not depend on the other rows
        or their number. More rows, float16 and devices without a kernel use the reference, three operations.

    Raises:
        KernelInputError: a shape, dtype or stride above does not hold.

    Cost: memory bound, ``weight.nbytes``.
    """
    size = hidden.shape[-1]
    if hidden.ndim != 2 or residual.shape != hidden.shape or residual.dtype != hidden.dtype:
        raise KernelInputError(
            f"hidden and residual must both be [T, E] of one dtype, got {tuple(hidden.shape)} {hidden.dtype} and "
            f"{tuple(residual.shape)} {residual.dtype}"
        )
    if norm_weight.shape != (size,) or norm_weight.dtype not in (hidden.dtype, torch.float32):
        raise KernelInputError(
            f"norm_weight must be {hidden.dtype} or float32 [{size}], got {norm_weight.dtype} "
            f"{tuple(norm_weight.shape)}"
        )
    if activation not in (None, *GATES):
        raise KernelInputError(f"activation must be None or one of {GATES}, got {activation!r}")
    is_even = activation is None or weight.shape[0] % 2 == 0
    if weight.ndim != 2 or weight.shape[1] != size or weight.dtype != hidden.dtype or not is_even:
        raise KernelInputError(
            f"weight must be {hidden.dtype} [N, {size}], with an even N for a gate, got {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    if not weight.is_contiguous():
        raise KernelInputError("weight must be contiguous")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise KernelInputError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    run = select(_IMPLEMENTATIONS, hidden.device, hidden.dtype, backend)
    return run(hidden, residual, norm_weight, eps, weight, bias, activation)
