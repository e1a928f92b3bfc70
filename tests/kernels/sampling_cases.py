"""Rows to sample from, for the tests of every way of sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.sampling import Draws


def draws_of(num_rows: int, **params: float) -> Draws:
    """Return draws of ``num_rows`` equal rows, with uniform numbers spread evenly over [0, 1)."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    return Draws(
        temperature=torch.full((num_rows,), values["temperature"]),
        top_k=torch.full((num_rows,), int(values["top_k"])),
        top_p=torch.full((num_rows,), values["top_p"]),
        min_p=torch.full((num_rows,), values["min_p"]),
        uniforms=(torch.arange(num_rows, dtype=torch.float64) + 0.37) / num_rows,
    )


def logits_of(num_rows: int, vocab_size: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    return scale * torch.randn(num_rows, vocab_size, generator=generator)
