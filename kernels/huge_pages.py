"""Memory that is taken when it is written: in huge pages for weights, which every step reads from start to end, and for
caches with blocks in order; in small pages for tensors of which only beginnings may be used.

With pages of 4 KiB one thread reads a weight at 13 GB/s, with huge pages at 17 GB/s (a Xeon with AMX). The kernel only
creates aligned huge pages, so weights smaller than a page share arenas.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
# An arena is freed with its last tensor. Memory after the last tensor is never touched, so it is never allocated.
_ARENA_BYTES = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Allocator of consecutive tensors in huge pages, if the kernel grants them. Not thread-safe."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._next, self._end = 0, 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros on the CPU, aligned to 64 bytes, whose memory is taken when it is written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype)
        if self._mapping is None or num_bytes > self._end - self._next:
            size = max(num_bytes, _ARENA_BYTES)
            self._mapping = _map(size + _HUGE_PAGE_BYTES, in_huge_pages=True)
            self._next = -torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
            self._end = self._next + size
        # The tensor keeps the mapping alive.
        raw = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=self._next)
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return raw.view(dtype).view(shape)


def zeros_in_small_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on the CPU whose memory is taken in the smallest pages, when it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    # torch would write the zeros now, and numpy would ask for huge pages.
    return torch.frombuffer(_map(num_bytes, in_huge_pages=False), dtype=torch.uint8).view(dtype).view(shape)


def _map(num_bytes: int, *, in_huge_pages: bool) -> mmap.mmap:
    """Map memory that is allocated as it is written. Only aligned parts are in huge pages."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    if in_huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
