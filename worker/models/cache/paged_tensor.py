"""What a layer keeps for each token, in blocks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class PagedTensor:
    """``[NB, BS, *shape]`` once allocated; ``shape`` is that of one token, heads first."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.blocks = torch.empty(0, dtype=dtype)

    @property
    def bytes_per_token(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.blocks = zeros((num_blocks, block_size, *self.shape), self.dtype, device)

    def slots(self) -> Tensor:
        """The same memory as ``[NB * BS, *shape]``."""
        return self.blocks.flatten(0, 1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that takes memory only as it is written."""
    if device.type != "cpu" or math.prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the kernel for zero pages, huge ones, and takes them when they are written; torch writes them all now.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
