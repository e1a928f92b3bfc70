"""Feedback of rounding errors, so that the errors of a weight's inputs compensate each other in products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import KernelInputError
from ..native import library

# Added to the diagonal, as a share of its mean, because the examples may leave some inputs zero or equal. The larger
# ones are for matrices that float32 cannot factor.
_DAMPINGS = (0.01, 0.1, 1.0)
# Added, too, times inputs per example: few examples, as a rare expert has, say little of other inputs.
_DAMPING_OF_FEW = 0.05
_PRODUCT_BLOCK = 256


def error_feedback(examples: Tensor) -> Tensor | None:
    """Return the ``feedback`` with which ``quantize_weight_to_nibbles`` rounds a weight for inputs like ``examples``.

    Rounding goes from the first input of an output to the last. The error of input ``i`` is added to each later input
    ``j``, times ``feedback[i, j]``, before ``j`` is rounded. The diagonal is what the squared error of an input then
    adds to the squared error of all products.

    Args:
        examples: ``[T, K]``, some inputs of the layer, float32 or bfloat16.

    Returns:
        float32 ``[K, K]``, for rotated inputs, zero below the diagonal; None if examples are not finite or all zero.

    Raises:
        KernelInputError: another dtype, or the compiled library is not loaded.

    Cost: ``T * K ** 2 + K ** 3 / 3`` operations, memory for ``3 * K ** 2 + T * K`` floats.
    Source: Frantar et al. 2022 (arXiv:2210.17323), in the equivalent form LDLQ of Chee et al. 2023 (arXiv:2307.13304).
    """
    rotate_rows = library("rotate_rows", examples.dtype)
    if rotate_rows is None or examples.ndim != 2:
        actual = f"{examples.dtype} {tuple(examples.shape)}"
        raise KernelInputError(f"examples must be [T, K] of a dtype of the compiled library, got {actual}")
    source = examples.contiguous()
    rows = torch.empty(source.shape, dtype=torch.float32)
    rotate_rows(source.data_ptr(), rows.data_ptr(), *source.shape)
    # Flipped, for an upper triangular factor with hessian = factor @ factor.T. Only the lower triangle is read.
    flipped = _upper_products(rows).flip(0, 1)
    mean = flipped.diagonal().mean()
    flipped.diagonal().add_(_DAMPING_OF_FEW * rows.shape[1] / max(1, len(rows)) * mean)
    for damping in _DAMPINGS:
        flipped.diagonal().add_(damping * mean)
        factor, info = torch.linalg.cholesky_ex(flipped)
        if info == 0:
            factor = factor.flip(0, 1).contiguous()
            roots = factor.diagonal().clone()
            factor /= roots
            factor.diagonal().copy_(roots.square())
            return factor
    return None


def _upper_products(rows: Tensor) -> Tensor:
    """Return ``rows.T @ rows``, of which only the upper triangle and the blocks on the diagonal are computed."""
    size = rows.shape[1]
    products = torch.zeros(size, size)
    for start in range(0, size, _PRODUCT_BLOCK):
        end = start + _PRODUCT_BLOCK
        products[start:end, start:] = rows[:, start:end].T @ rows[:, start:]
    return products
