"""The faster interpreter of the tests gives the results of Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _sum(left, right, out, size: tl.constexpr, step: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(left + index) + tl.load(right + index) * step)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not look for it")
@pytest.mark.parametrize(("left", "step"), [(2**31 - 2, 1), (-(2**31) + 3, -2), (0, 2**30)])
def test_a_sum_or_a_product_that_is_too_large_for_its_type(left: int, step: int, device: torch.device) -> None:
    numbers = torch.tensor([1, left], dtype=torch.int32, device=device)
    out = torch.empty_like(numbers)
    launch: Any = _sum[(1,)]  # whose constants of a kernel are numbers
    launch(numbers * 0 + 1, numbers * 0 + 1, out, 2, 7)
    assert out.tolist() == [8, 8]
    with pytest.raises(Exception, match=r"int32 overflow detected for operation (add|sub|mul)"):
        launch(numbers, torch.tensor([1, 2], dtype=torch.int32, device=device), out, 2, step)


@triton.jit
def _mixture(numbers, halves, out, rows: tl.constexpr, columns: tl.constexpr):
    down, across = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    number, half = tl.load(numbers + down), tl.load(halves + across)
    tl.store(out + down * columns + across, (number + 1) * half + 0.5 * number - across)


def test_repeated_calls_stay_as_accurate(device: torch.device) -> None:
    """Rows and columns, of three types, and numbers of two kinds on either side."""
    launch: Any = _mixture[(1,)]
    for first in (-3, 40):
        numbers = torch.arange(first, first + 4, dtype=torch.int32, device=device)
        halves = (torch.arange(8, device=device) / 8).bfloat16()
        out = torch.empty(4, 8, device=device)
        launch(numbers, halves, out, 4, 8)
        down, across = numbers[:, None], torch.arange(8, device=device)
        assert torch.equal(out, (down + 1) * halves.float() + 0.5 * down - across)
