"""In Triton, for a GPU: a lane for each penalised logit."""

# What Triton compiles is typed as if Python ran it.
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
    places = _together((rows, token_ids), logits.device)
    changes = _together((repetition, deduction), logits.device)
    _penalize_kernel[(triton.cdiv(rows.numel(), _BLOCK),)](
        logits, logits.stride(0), logits.stride(1), places, changes, rows.numel(), BLOCK=_BLOCK, num_warps=4
    )


def _together(pair: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
    """Both in one ``[2, E]`` on ``device``, by way of pinned memory if they are on the CPU."""
    is_pinned = pair[0].device.type == "cpu" and device.type == "cuda"
    both = torch.empty(2, len(pair[0]), dtype=pair[0].dtype, device=pair[0].device, pin_memory=is_pinned)
    torch.stack(pair, out=both)
    return both.to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_entries"])
def _penalize_kernel(logits, row_stride, token_stride, places, changes, num_entries, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < num_entries
    row = tl.load(places + at, mask=is_there, other=0)
    token = tl.load(places + num_entries + at, mask=is_there, other=0)
    repetition = tl.load(changes + at, mask=is_there, other=1.0)
    deduction = tl.load(changes + num_entries + at, mask=is_there, other=0.0)
    place = logits + row * row_stride + token * token_stride
    logit = tl.load(place, mask=is_there, other=0.0)
    logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
    tl.store(place, logit - deduction, mask=is_there)
