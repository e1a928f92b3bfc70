"""Compiled kernel for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See ``gated_activation.silu_and_mul``."""
    function = library("silu_and_mul", gate_up.dtype)
    if function is None or not gate_up.is_contiguous():
        return reference.silu_and_mul(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype)
    function(gate_up.data_ptr(), out.data_ptr(), num_rows, size)
    return out
