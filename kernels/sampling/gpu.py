"""Triton kernels for the GPU. They neither sort the vocabulary, nor use noise, nor read back to the host.

A row is cut into at most 256 blocks. The kernels compute:

1. for each block its largest logit (``gpu_blocks.py``);
2. for each row the most probable token, and a bound that at least 64 tokens reach: the 64th largest of these maxima;
3. for each block the sum of its weights, and its candidates, the tokens that reach the bound: about a hundred per row;
4. the draw: from the candidates if ``top_k`` or ``top_p`` filters, else in the order of the vocabulary
   (``gpu_draw.py``). The few rows that need more tokens than their candidates are searched, 4 bits of a logit per pass
   (``gpu_search.py``).

Kernels 1 and 3 read all logits with a program for every 4,096 of them, the others have one program per row. The order
of a row's sums depends on ``V`` only, so its token does not depend on the other rows. Tokens are considered in the same
order as in the reference, so the same uniform number draws the same token.
"""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .draws import Draws
from .gpu_blocks import STATES, block_maxima_kernel, block_weights_kernel, row_bounds_kernel
from .gpu_draw import draw_kernel
from .gpu_search import search_kernel

MAX_BLOCKS = 256
# Logits per program, in at least 4 blocks. Twice as many spill registers (Triton 3.6).
_GROUP_SIZE = 4096
_MIN_BLOCK = 8
# Number of most probable tokens that the reference and the C++ consider first. Whether top_p ends among them decides
# the order in which a row draws.
WIDTH = 64
# Maximal number of candidates of a row. A row with more of them, which has many equal logits, is searched.
CAPACITY = 512
_SEARCH_BLOCK = 1024


def argmax(logits: Tensor) -> Tensor:
    """See ``sampling.argmax``."""
    return _bounds(_with_contiguous_rows(logits))[0]


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See ``sampling.sample``."""
    logits = _with_contiguous_rows(logits)
    num_rows, vocab_size = logits.shape
    settings = _on_device(draws, logits.device)
    tokens, bounds = _bounds(logits)
    block = _block_size(vocab_size)
    group = _group_size(block)
    sums = torch.empty(num_rows, MAX_BLOCKS, dtype=torch.float32, device=logits.device)
    candidates = torch.empty(num_rows, 2, CAPACITY, dtype=torch.int32, device=logits.device)
    state = torch.zeros(num_rows, STATES.value, dtype=torch.int32, device=logits.device)
    if num_rows:
        block_weights_kernel[(num_rows, triton.cdiv(vocab_size, block * group))](
            logits, logits.stride(0), settings, bounds, sums, candidates, state,
            num_rows, vocab_size, BLOCK=block, GROUP=group, MAX_BLOCKS=MAX_BLOCKS, CAPACITY=CAPACITY, num_warps=8,
        )  # fmt: skip
        draw_kernel[(num_rows,)](
            logits, logits.stride(0), settings, bounds, sums, candidates, state, tokens,
            num_rows, vocab_size, BLOCK=block, MAX_BLOCKS=MAX_BLOCKS, CAPACITY=CAPACITY, WIDTH=WIDTH, num_warps=8,
        )  # fmt: skip
        search_kernel[(num_rows,)](
            logits, logits.stride(0), settings, bounds, state, tokens,
            num_rows, vocab_size, BLOCK=_SEARCH_BLOCK, WIDTH=WIDTH, num_warps=16,
        )  # fmt: skip
    return tokens


def _bounds(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most probable token of each row ``[R]``, and keys ``[R, 2]``: the largest, and the bound."""
    num_rows, vocab_size = logits.shape
    block = _block_size(vocab_size)
    num_blocks, group = triton.cdiv(vocab_size, block), _group_size(block)
    maxima = torch.empty(num_rows, 2, MAX_BLOCKS, dtype=torch.int32, device=logits.device)
    bounds = torch.empty(num_rows, 2, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block_maxima_kernel[(num_rows, triton.cdiv(num_blocks, group))](
            logits, logits.stride(0), maxima, vocab_size,
            BLOCK=block, GROUP=group, MAX_BLOCKS=MAX_BLOCKS, num_warps=8,
        )  # fmt: skip
        row_bounds_kernel[(num_rows,)](
            maxima, bounds, tokens, num_blocks, vocab_size, MAX_BLOCKS=MAX_BLOCKS, WIDTH=WIDTH, num_warps=4
        )
    return tokens, bounds


def _with_contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _block_size(vocab_size: int) -> int:
    return max(_MIN_BLOCK, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_BLOCKS)))


def _group_size(block: int) -> int:
    return min(MAX_BLOCKS, max(4, _GROUP_SIZE // block))


def _on_device(draws: Draws, device: torch.device) -> Tensor:
    """Return the columns of ``draws`` as float64, which represents them exactly, in one copy from pinned memory."""
    columns = draws.columns()
    is_pinned = columns[0].device.type == "cpu" and device.type == "cuda"
    shape = len(columns), len(columns[0])
    packed = torch.empty(shape, dtype=torch.float64, pin_memory=is_pinned, device=columns[0].device)
    for row, column in zip(packed, columns, strict=True):
        row.copy_(column)
    return packed.to(device, non_blocking=True)
