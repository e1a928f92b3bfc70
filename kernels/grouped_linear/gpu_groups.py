"""Triton kernels that sort entries by group and pad each group to whole blocks. All sizes stay on the device."""

# Pyright checks the functions that Triton compiles as if Python ran them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024


@dataclass(frozen=True)
class Groups:
    """``M`` entries in blocks of ``block`` rows; all entries of a block have the same group.

    Args:
        order: ``[max_blocks * block]`` int32, the entries of each block; ``M`` or more in the padding of a block, and
            uninitialized after the last block.
        group_of_block: ``[max_blocks]`` int32.
        num_blocks: ``[1]`` int32, on the device.
    """

    order: Tensor
    group_of_block: Tensor
    num_blocks: Tensor
    num_entries: int
    max_blocks: int
    block: int


def group_rows(group_ids: Tensor, num_groups: int, block: int) -> Groups:
    """Sort entries by group, stably; leave out entries with a negative group.

    Args:
        group_ids: any shape, int32 or int64; entries are numbered in row-major order.

    Cost: each of ``num_groups`` programs reads all ids twice.
    """
    ids = group_ids.reshape(-1)
    num_entries = ids.numel()
    max_blocks = min(num_entries, num_groups + num_entries // block)
    device = ids.device
    counts = torch.empty(num_groups, dtype=torch.int32, device=device)
    order = torch.empty(max_blocks * block, dtype=torch.int32, device=device)
    group_of_block = torch.empty(max_blocks, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    if num_entries:
        chunk = min(_CHUNK, max(16, triton.next_power_of_2(num_entries)))
        _count_kernel[(num_groups,)](ids, counts, num_entries, CHUNK=chunk, num_warps=4)
        _order_kernel[(num_groups,)](
            ids, counts, order, group_of_block, num_blocks, num_entries, num_groups,
            CHUNK=chunk, ALL_GROUPS=triton.next_power_of_2(num_groups), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return Groups(order, group_of_block, num_blocks, num_entries, max_blocks, block)


@triton.jit(do_not_specialize=["num_entries"])
def _count_kernel(ids, counts, num_entries, CHUNK: tl.constexpr):
    """Count the entries of one group."""
    group = tl.program_id(0)
    matches = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        matches += (tl.load(ids + entry, mask=entry < num_entries, other=-1).to(tl.int32) == group).to(tl.int32)
    tl.store(counts + group, tl.sum(matches, 0))


@triton.jit(do_not_specialize=["num_entries"])
def _order_kernel(
    ids, counts, order, group_of_block, num_blocks, num_entries, num_groups,
    CHUNK: tl.constexpr, ALL_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of one group after the blocks of the groups before it."""
    group = tl.program_id(0)
    all_groups = tl.arange(0, ALL_GROUPS)
    all_counts = tl.load(counts + all_groups, mask=all_groups < num_groups, other=0)
    all_blocks = (all_counts + BLOCK - 1) // BLOCK
    first_block = tl.sum(tl.where(all_groups < group, all_blocks, 0), 0)
    count = tl.sum(tl.where(all_groups == group, all_counts, 0), 0)
    last_block = first_block + (count + BLOCK - 1) // BLOCK
    begin = order + first_block * BLOCK
    num_stored = tl.full([], 0, tl.int32)
    for start in range(0, num_entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        is_member = tl.load(ids + entry, mask=entry < num_entries, other=-1).to(tl.int32) == group
        ones = is_member.to(tl.int32)
        tl.store(begin + num_stored + tl.cumsum(ones, 0) - 1, entry, mask=is_member)
        num_stored += tl.sum(ones, 0)
    rest = count + tl.arange(0, BLOCK)
    tl.store(begin + rest, tl.full((BLOCK,), 0, tl.int32) + num_entries, mask=rest < (last_block - first_block) * BLOCK)
    for block in range(first_block, last_block):
        tl.store(group_of_block + block, group)
    if group == num_groups - 1:
        tl.store(num_blocks, last_block)
