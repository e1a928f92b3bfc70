"""The rotation of rows, against products with the matrices that define it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.rotation import rotate


def hadamard(size: int) -> Tensor:
    """Return Sylvester's matrix of ``size``, a power of two, orthonormal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(1, [1]), (4, [4]), (7, [4, 2, 1]), (132, [128, 4]), (576, [512, 64]), (1540, [512, 512, 512, 4])],
)
def test_a_row_is_multiplied_block_by_block(size: int, blocks: list[int]) -> None:
    rows = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size))
    parts = [part.double() @ hadamard(part.shape[-1]) for part in rows.split(blocks, -1)]
    torch.testing.assert_close(rotate(rows).double(), torch.cat(parts, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(rows)), rows, rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_its_dtype_or_the_other_rows() -> None:
    rows = torch.randn(5, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rotate(rows), rotate(rows.float()))
    assert torch.equal(rotate(rows)[2], rotate(rows[2]))
