"""Triton kernel for the GPU: a lane for each penalised logit."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


def penalize(logits: Tensor, rows: Tensor, token_ids: Tensor, repetition: Tensor, deduction: Tensor) -> None:
    """See ``penalties.penalize``."""
    if rows.numel() == 0:
        return
    indices = _stack_on_device((rows, token_ids), logits.device)
    changes = _stack_on_device((repetition, deduction), logits.device)
    _penalize_kernel[(triton.cdiv(rows.numel(), _BLOCK),)](
        logits, logits.stride(0), logits.stride(1), indices, changes, rows.numel(), BLOCK=_BLOCK, num_warps=4
    )


def _stack_on_device(pair: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Return both as one ``[2, E]`` on ``device``, copied through pinned memory if they are on the CPU."""
    is_pinned = pair[0].device.type == "cpu" and device.type == "cuda"
    both = torch.empty(2, len(pair[0]), dtype=pair[0].dtype, device=pair[0].device, pin_memory=is_pinned)
    torch.stack(pair, out=both)
    return both.to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_entries"])
def _penalize_kernel(logits, row_stride, token_stride, indices, changes, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_entries
    row = tl.load(indices + entry, mask=is_entry, other=0)
    token = tl.load(indices + num_entries + entry, mask=is_entry, other=0)
    repetition = tl.load(changes + entry, mask=is_entry, other=1.0)
    deduction = tl.load(changes + num_entries + entry, mask=is_entry, other=0.0)
    pointer = logits + row * row_stride + token * token_stride
    logit = tl.load(pointer, mask=is_entry, other=0.0)
    logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
    tl.store(pointer, logit - deduction, mask=is_entry)
