"""Sampling parameters of the rows of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Of the fields of ``Draws``, in the order in which the kernels take them.
DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "uniforms": torch.float64,
}


@dataclass
class Draws:
    """Sampling parameters of ``R`` rows, contiguous, all on the CPU or all on the device of the logits.

    In descending order of probability each filter keeps a prefix of the tokens; they apply in the order ``min_p``,
    ``top_k``, ``top_p``, to probabilities at the row's temperature.

    Args:
        temperature: ``[R]`` float32; 0 takes the most probable token.
        top_k: ``[R]`` int64; values below 1 keep all, as do values of at least ``V``.
        top_p, min_p: ``[R]`` float32; 1 and 0 keep all.
        uniforms: ``[R]`` float64 in [0, 1), the quantile of each row's token in its distribution.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor

    def columns(self) -> list[Tensor]:
        """Return all parameters, in the order of ``DTYPES``."""
        return [getattr(self, name) for name in DTYPES]

    def select(self, rows: Tensor) -> Draws:
        """Return the parameters of some rows, selected by a mask or an index."""
        return Draws(*(column[rows] for column in self.columns()))

    def to(self, device: torch.device) -> Draws:
        """Return a copy on ``device``."""
        return Draws(*(column.to(device) for column in self.columns()))
