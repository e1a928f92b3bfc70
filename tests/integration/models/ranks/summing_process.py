"""``python -m ….ranks.summing_process RANK WORLD MEETING ROLE``: one rank that adds up with others.

What a role is about is asserted here, in every rank; what it sees of another's end it writes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels import native
from penstock.worker.models.parallel.communicator import SLOT_BYTES, Communicator, MemoryCommunicator, SharedMemory
from penstock.worker.models.parallel.groups import RankGroups
from penstock.worker.models.parallel.layout import ParallelLayout

SILENCE_S = 0.5


def rows(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def add_up(groups: RankGroups, rank: int, world: int) -> None:
    """Add as gloo does: of every dtype, of no rows and of many, and of what lies apart."""
    shapes = [(1,), (3, 5), (0, 8), (SLOT_BYTES // 4,), (SLOT_BYTES // 2 + 7,)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for shape in shapes:
            ours = rows(rank, *shape, dtype=dtype)
            wanted = rows(0, *shape, dtype=dtype)
            for other in range(1, world):
                wanted += rows(other, *shape, dtype=dtype)
            assert groups.all_reduce(ours) is ours
            assert torch.equal(ours, wanted), (dtype, shape)
    apart = rows(rank, 6, 4)
    groups.all_reduce(apart[:, 1:3])
    assert torch.equal(apart[:, [0, 3]], rows(rank, 6, 4)[:, [0, 3]])
    assert torch.allclose(apart[:, 1:3], sum((rows(one, 6, 4)[:, 1:3] for one in range(world)), torch.zeros(6, 2)))
    for width in (3, SLOT_BYTES // 4):
        whole = groups.gather(rows(rank, 2, width))
        assert whole.shape == (2, width * world)
        assert rank > 0 or torch.equal(whole, torch.cat([rows(one, 2, width) for one in range(world)], dim=-1))


def go_round(memory: SharedMemory, world: int) -> None:
    """The number of meetings is written in 32 bits."""
    for number in (1 << 31) - 2, (1 << 32) - 4:
        memory._number = number
        for _ in range(8):
            assert memory.sum(torch.ones(3)).tolist() == [world] * 3


def see_the_end_of(how: str, groups: RankGroups, memory: SharedMemory, rank: int, world: int) -> None:
    """The last rank ends, or stands still, before it has come; the others say what they see."""
    groups.all_reduce(torch.ones(1))
    if how == "stopped":
        memory._timeout_s = SILENCE_S
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        groups.all_reduce(torch.ones(1))
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
    # Till the test ends it: the end of one that has written is not what the others are to see.
    signal.pause()


def outlive_one_that_has_come(groups: RankGroups, memory: SharedMemory, rank: int, seen: Path) -> None:
    """The last of three ranks ends once it has come; the next comes when the first has seen that, and has waited on."""
    wait_at_barrier, ends = memory._wait_at_barrier, memory._ends

    def come_and_end(*place_and_number: int) -> None:
        wait_at_barrier(*place_and_number[:-1], 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def look(timeout_ms: int) -> list[tuple[int, int]]:
        if found := ends.poll(timeout_ms):
            seen.touch()
        return found

    if rank == 2:
        memory._wait_at_barrier = come_and_end
    elif rank == 1:
        while not seen.exists():
            time.sleep(0.01)
    else:
        looking: Any = SimpleNamespace(poll=look)
        memory._ends = looking
    assert groups.all_reduce(torch.full((2,), float(rank))).tolist() == [3.0, 3.0]


def main(rank: int, world: int, meeting: str, role: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    if role != "without" or rank != world - 1:
        assert native.load() is None
    groups = RankGroups(ParallelLayout(world), rank, timeout_s=60)
    if role == "without":
        assert type(groups.stage) is Communicator
        groups.all_reduce(total := torch.ones(2))
        assert total.tolist() == [world] * 2
        return
    assert isinstance(groups.stage, MemoryCommunicator)
    if role == "sums":
        add_up(groups, rank, world)
        go_round(groups.stage.memory, world)
    elif role == "left":
        outlive_one_that_has_come(groups, groups.stage.memory, rank, Path(f"{meeting}.seen"))
    else:
        see_the_end_of(role, groups, groups.stage.memory, rank, world)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
