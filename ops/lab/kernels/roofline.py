"""The best rates of this device, measured in the same run as the rows that are compared with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .timing import measure


@dataclass(frozen=True)
class Roofline:
    """Best rates of a device.

    Args:
        copy_gb_per_s: bytes read and written by a large copy.
        matmul_tflop_per_s: rate of a large bfloat16 product of normally distributed numbers (zeros draw less power).
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float

    def bound_us(self, num_bytes: int, num_flop: int) -> float:
        """Return the time of a kernel that only moves these bytes and does this arithmetic, both at the same time."""
        return max(num_bytes / self.copy_gb_per_s * 1e-3, num_flop / self.matmul_tflop_per_s * 1e-6)

    def is_memory_bound(self, num_bytes: int, num_flop: int) -> bool:
        return num_bytes / self.copy_gb_per_s * 1e-3 >= num_flop / self.matmul_tflop_per_s * 1e-6


def measure_roofline(device: torch.device, budget_s: float, *, is_quick: bool = False) -> Roofline:
    """Copy a gigabyte and multiply matrices of 8192 rows; on a CPU 64 megabytes and 1024 rows, or 128 rows to try the
    command out: a processor without instructions for bfloat16 takes seconds for a larger product.
    """
    is_gpu = device.type == "cuda"
    source = torch.ones((1 << 30) if is_gpu else (1 << 26), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_us = measure(lambda: target.copy_(source), device, budget_s).us
    size = 8192 if is_gpu else 128 if is_quick else 1024
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    matmul_us = measure(lambda: left @ right, device, budget_s).us
    return Roofline(2 * source.nbytes / copy_us * 1e-3, 2 * size**3 / matmul_us * 1e-6)
