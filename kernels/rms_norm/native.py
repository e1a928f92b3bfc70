"""Compiled kernel for the CPU: one pass for the sum, one for the scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import library
from . import reference


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``rms_norm.rms_norm``."""
    function = library("rms_norm", inputs.dtype)
    if function is None or not weight.is_contiguous():
        return reference.rms_norm(inputs, weight, eps)
    size = inputs.shape[-1]
    rows = inputs.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(inputs.shape, dtype=inputs.dtype)
    is_wide, num_weights = weight.dtype == torch.float32, weight.numel() // size
    weights = weight.data_ptr(), is_wide, num_weights
    function(rows.data_ptr(), rows.stride(0), None, *weights, out.data_ptr(), rows.shape[0], size, eps)
    return out


def add_rms_norm(inputs: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``rms_norm.add_rms_norm``."""
    function = library("rms_norm", inputs.dtype)
    are_plain = inputs.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
    if function is None or not are_plain:
        return reference.add_rms_norm(inputs, residual, weight, eps)
    num_rows, size = inputs.shape
    out = torch.empty_like(inputs)
    weights = weight.data_ptr(), weight.dtype == torch.float32, 1
    function(inputs.data_ptr(), size, residual.data_ptr(), *weights, out.data_ptr(), num_rows, size, eps)
    return out, residual
