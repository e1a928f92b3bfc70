"""Triton: entries sorted by group, each group padded to whole blocks; all sizes stay on the device."""

# What Triton compiles is typed as if Python ran it.
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
    """``M`` entries in blocks of ``block`` rows, every block of one group.

    Args:
        order: ``[max_blocks * block]`` int32, the entries of each block; ``M`` or more where a block is not full, and
            unwritten behind the last block.
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
    """Order entries by their group, those of a group as they come; entries of a negative group are left out.

    Args:
        group_ids: any shape, int32 or int64; entries count along all axes.

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
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_entries, CHUNK):
        at = start + tl.arange(0, CHUNK)
        found += (tl.load(ids + at, mask=at < num_entries, other=-1).to(tl.int32) == group).to(tl.int32)
    tl.store(counts + group, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_entries"])
def _order_kernel(
    ids, counts, order, group_of_block, num_blocks, num_entries, num_groups,
    CHUNK: tl.constexpr, ALL_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the entries of one group behind the blocks of the groups before it."""
    group = tl.program_id(0)
    every = tl.arange(0, ALL_GROUPS)
    all_counts = tl.load(counts + every, mask=every < num_groups, other=0)
    all_blocks = (all_counts + BLOCK - 1) // BLOCK
    first_block = tl.sum(tl.where(every < group, all_blocks, 0), 0)
    count = tl.sum(tl.where(every == group, all_counts, 0), 0)
    last_block = first_block + (count + BLOCK - 1) // BLOCK
    begin = order + first_block * BLOCK
    passed = tl.full([], 0, tl.int32)
    for start in range(0, num_entries, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_ours = tl.load(ids + at, mask=at < num_entries, other=-1).to(tl.int32) == group
        counted = is_ours.to(tl.int32)
        tl.store(begin + passed + tl.cumsum(counted, 0) - 1, at, mask=is_ours)
        passed += tl.sum(counted, 0)
    rest = count + tl.arange(0, BLOCK)
    tl.store(begin + rest, tl.full((BLOCK,), 0, tl.int32) + num_entries, mask=rest < (last_block - first_block) * BLOCK)
    for block in range(first_block, last_block):
        tl.store(group_of_block + block, group)
    if group == num_groups - 1:
        tl.store(num_blocks, last_block)
