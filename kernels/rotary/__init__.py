"""Rotary position embedding of query and key heads."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import REFERENCE, select
from ..errors import KernelInputError
from . import native, reference

_IMPLEMENTATIONS = {REFERENCE: reference.apply_rotary, "cpu": native.apply_rotary}


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + D / 2])`` of a head by its token's angle.

    Args:
        heads: ``[T, H, D]``, any strides (a slice of a fused QKV needs no copy); query and key heads may come in one.
        cos, sin: ``[T, D]``, of the angles; their two halves are alike. Dtype of ``heads``.

    Returns:
        ``[T, H, D]`` in the dtype of ``heads``.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: memory bound, ``2 * T * H * D * itemsize`` bytes.
    Source: Su et al. 2021 (arXiv:2104.09864), with the halves of a head as the pairs.
    """
    if heads.ndim != 3 or heads.shape[2] % 2:
        raise KernelInputError(f"heads must be [T, H, D] with an even D, got {tuple(heads.shape)}")
    wanted = (heads.shape[0], heads.shape[2])
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles.shape != wanted or angles.dtype != heads.dtype:
            raise KernelInputError(f"{name} must be {heads.dtype} {wanted}, got {angles.dtype} {tuple(angles.shape)}")
    return select(_IMPLEMENTATIONS, heads.device, heads.dtype)(heads, cos, sin)
