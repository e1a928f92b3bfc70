"""What the rows of one step are drawn by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Draws:
    """Parameters of ``R`` rows, contiguous, all on the CPU or all where the logits are.

    In descending order of probability each filter keeps a prefix of the tokens; they apply in the order ``min_p``,
    ``top_k``, ``top_p``, to probabilities at the row's temperature.

    Args:
        temperature: ``[R]`` float32; 0 takes the most probable token.
        top_k: ``[R]`` int64; 0 keeps all, as does one that is not below ``V``.
        top_p, min_p: ``[R]`` float32; 1 and 0 keep all.
        uniforms: ``[R]`` float64 in [0, 1): where in the distribution the row's token lies.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor

    def take(self, rows: Tensor) -> Draws:
        """Those of some rows, by a mask or an index."""
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniforms[rows])

    def to(self, device: torch.device) -> Draws:
        """The same on ``device``."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniforms)
        return Draws(*(column.to(device) for column in columns))
