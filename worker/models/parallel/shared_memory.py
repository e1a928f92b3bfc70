"""What ranks of one host say to each other in memory that they share: sums of a few numbers, many times a step.

gloo hands each sum to a thread and through sockets, which takes a millisecond for two ranks, twice a layer. Here a rank
writes its part into the memory, waits until all have (``kernels/native/barrier.cpp``), and adds up what is there.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....kernels import native

# Of one rank's part; what is larger goes piece by piece.
ROOM_BYTES = 1 << 20
_SEAT_BYTES = 64
_NUM_NUMBERS = 1 << 32
# So often, while a rank does not come, is looked whether it is there at all.
_LOOK_MS = 100
_NOT_THERE = -1


class SharedMemory:
    """One rank's view of it.

    A part stays where it was written until its writer comes to the meeting after the next one: all have read it by
    then, or they would not have come to the next. So each rank has two places, in turns.

    Args:
        memory: the same of all ranks, of ``size_of(len(pids))`` bytes.
        rank: this one's number among ``pids``.
        pids: of all ranks.
        timeout_s: who does not come for as long is lost.
        wait_at_barrier: of the compiled kernels.

    Raises:
        OSError: a process cannot be watched.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, pids: Sequence[int], timeout_s: float, wait_at_barrier: Any
    ) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        # How often each has come, as ``barrier.cpp`` writes it.
        self._come = self._bytes[: len(pids) * _SEAT_BYTES].view(torch.int32)[:: _SEAT_BYTES // 4]
        self._rank, self._size, self._timeout_s = rank, len(pids), timeout_s
        self._wait_at_barrier = wait_at_barrier
        self._number = 0
        self._watched: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._watched)
        self._ends = select.poll()
        for number, pid in enumerate(pids):
            if number != rank:
                descriptor = os.pidfd_open(pid)
                self._watched[descriptor] = number
                self._ends.register(descriptor, select.POLLIN)
        self._places = lru_cache(self._make_places)

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks, in their order, in place; return ``part``.

        Raises:
            RuntimeError: a rank is gone, or silent for too long.
        """
        rows = part.view(-1) if part.is_contiguous() else part.reshape(-1)
        for piece in rows.split(ROOM_BYTES // part.element_size()):
            first, second, *others = self._show(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
        return part if rows.data_ptr() == part.data_ptr() else part.copy_(rows.view_as(part))

    def has_room(self, part: Tensor) -> bool:
        """Whether ``parts`` can be had of parts like this one."""
        return part.numel() * part.element_size() <= ROOM_BYTES

    def parts(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order and shaped alike; to be read before the next call.

        Raises:
            RuntimeError: as ``sum``.
        """
        return [shown.view_as(part) for shown in self._show(part.reshape(-1))]

    def _show(self, row: Tensor) -> list[Tensor]:
        self._number += 1
        places = self._places(row.dtype, self._number % 2)
        shown = [place[: len(row)] for place in places]
        shown[self._rank].copy_(row)
        if not self._wait_at_barrier(self._address, self._rank, self._size, self._number, _LOOK_MS):
            self._await_all()
        return shown

    def _await_all(self) -> None:
        give_up_at = time.monotonic() + self._timeout_s
        while not self._wait_at_barrier(self._address, self._rank, self._size, self._number, _LOOK_MS):
            # Seats are read after ends: who has ended does not come any more.
            for gone in [self._watched[descriptor] for descriptor, _ in self._ends.poll(0)]:
                if not self._has_come(gone):
                    raise RuntimeError(f"rank {gone} of {self._size} is gone")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"a rank of {self._size} has not come for {self._timeout_s:g} s")

    def _has_come(self, rank: int) -> bool:
        """Whether it has to this meeting, or to the next since: numbers go round, as in ``barrier.cpp``."""
        return (int(self._come[rank]) - self._number) % _NUM_NUMBERS < _NUM_NUMBERS // 2

    def _make_places(self, dtype: torch.dtype, turn: int) -> list[Tensor]:
        """Of all ranks, ``[ROOM_BYTES / element size]`` each."""
        start = self._size * (_SEAT_BYTES + turn * ROOM_BYTES)
        return list(self._bytes[start : start + self._size * ROOM_BYTES].view(dtype).chunk(self._size))


def size_of(num_ranks: int) -> int:
    """Bytes of the memory: seats, and two places for each rank."""
    return num_ranks * (_SEAT_BYTES + 2 * ROOM_BYTES)


def share_memory(group: dist.ProcessGroup, timeout_s: float) -> SharedMemory | None:
    """Have all ranks of ``group``, which call this at the same time, share memory.

    None for all of them where one cannot: without the compiled kernels, on another host, where processes may not see
    each other's descriptors. Who is alone has nobody to add up with.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    wait_at_barrier = native.library("wait_at_barrier")
    mark = secrets.randbits(62)
    descriptor = _make_file(size_of(size), mark) if rank == 0 and wait_at_barrier is not None else _NOT_THERE
    try:
        told = torch.tensor([os.getpid(), descriptor, mark])
        all_told = [torch.empty_like(told) for _ in range(size)]
        dist.all_gather(all_told, told, group=group)
        pids = [int(row[0]) for row in all_told]
        memory = None
        if wait_at_barrier is not None and all_told[0][1] != _NOT_THERE:
            memory = _open(f"/proc/{pids[0]}/fd/{int(all_told[0][1])}", int(all_told[0][2]), size_of(size))
        shared = None
        if memory is not None:
            with suppress(OSError):
                shared = SharedMemory(memory, rank, pids, timeout_s, wait_at_barrier)
        can = torch.tensor([shared is not None])
        dist.all_reduce(can, dist.ReduceOp.MIN, group=group)
        return shared if can else None
    finally:
        if descriptor != _NOT_THERE:
            os.close(descriptor)


def _make_file(size: int, mark: int) -> int:
    """A file in memory that ends with ``mark``; ``_NOT_THERE`` if there can be none."""
    try:
        descriptor = os.memfd_create("penstock-sums")
    except OSError:
        return _NOT_THERE
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, mark.to_bytes(8, "little"), size - 8)
    except OSError:
        os.close(descriptor)
        return _NOT_THERE
    return descriptor


def _open(path: str, mark: int, size: int) -> mmap.mmap | None:
    """Map another process's file, if it ends with ``mark``: processes of other hosts have the same numbers."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        memory = mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return memory if int.from_bytes(memory[size - 8 :], "little") == mark else None


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
