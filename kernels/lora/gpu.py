"""Triton kernels for the GPU: both products by ``grouped_linear``, with tokens grouped by adapter."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..grouped_linear.gpu import multiply, rows_per_block
from ..grouped_linear.gpu_groups import Groups, group_rows

# Inputs per part of a split sum: with 4096 inputs, one token of one adapter keeps 8 programs busy.
_SPLIT_INPUTS = 512


def lora_shrink(inputs: Tensor, a: Tensor, token_lora: Tensor) -> Tensor:
    """See ``lora.lora_shrink``."""
    num_splits = triton.cdiv(inputs.shape[1], _SPLIT_INPUTS)
    parts = torch.zeros(num_splits, len(inputs), a.shape[1], dtype=torch.float32, device=inputs.device)
    multiply(inputs, a, _group(token_lora, len(a)), parts, entries_per_row=1, num_splits=num_splits)
    return parts.sum(dim=0)


def lora_expand(inputs: Tensor, b: Tensor, token_lora: Tensor, out: Tensor, scale: float) -> None:
    """See ``lora.lora_expand``."""
    groups = _group(token_lora, len(b))
    multiply(inputs.to(out.dtype), b, groups, out, entries_per_row=1, is_added=True, scale=scale)


def _group(token_lora: Tensor, num_adapters: int) -> Groups:
    return group_rows(token_lora, num_adapters, rows_per_block(len(token_lora), num_adapters))
