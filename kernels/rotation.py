"""The rotation of rows before they become bytes, in torch. The kernels compute the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512


def rotate(rows: Tensor) -> Tensor:
    """Multiply ``[..., K]`` with orthonormal Hadamard matrices, in float32; a second rotation undoes the first.

    All bytes of a row share a step, which the row's largest value decides. The rotation spreads an outlier over its
    block. With rows and weights rotated alike, their products stay the same.

    A row is cut into blocks of 512, and the rest into the powers of two of its size, the largest first.

    Source: Ashkboos et al. 2024 (arXiv:2404.00456).
    """
    num_left = rows.shape[-1] % BLOCK
    sizes = [1 << bit for bit in reversed(range(num_left.bit_length())) if num_left >> bit & 1]
    whole, *rest = rows.float().split([rows.shape[-1] - num_left, *sizes], dim=-1)
    parts = [_rotate_blocks(whole, BLOCK), *(_rotate_blocks(part, part.shape[-1]) for part in rest)]
    return torch.cat(parts, dim=-1)


def _rotate_blocks(rows: Tensor, size: int) -> Tensor:
    """Rotate each block of ``size`` elements, a power of two."""
    half = 1
    while half < size:
        pairs = rows.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return rows * (1 / torch.tensor(float(size)).sqrt()).to(rows.device)
