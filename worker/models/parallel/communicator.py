"""The collectives of ranks that compute a step together: by torch's group, or in memory that they share on one host.

gloo passes each sum to a thread and through sockets, which takes a millisecond for two ranks, twice per layer. In
shared memory a rank writes its part, waits until all have (``kernels/native/base/barrier.cpp``), and adds the parts.
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

# Size of one rank's part; larger ones are sent in pieces.
SLOT_BYTES = 1 << 20
_COUNTER_BYTES = 64
_NUM_NUMBERS = 1 << 32
# Interval, while a rank is late, at which its process is checked.
_CHECK_INTERVAL_MS = 100
_MISSING = -1


class Communicator:
    """Collectives by torch. Each waits for the other ranks, and raises ``RuntimeError`` if one exits or times out.

    Args:
        group: of the ranks; None for torch's default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._first = dist.get_process_group_ranks(group)[0]
        self._size = dist.get_world_size(group)
        self._is_first = dist.get_rank(group) == 0

    @property
    def adds_in_order(self) -> bool:
        """Whether parts are added in the same order for any shape. Two parts have only one order."""
        return self._size <= 2

    def sum(self, part: Tensor) -> Tensor:
        """Sum the parts of all ranks, of one shape, in place; return ``part``."""
        dist.all_reduce(part, group=self._group)
        return part

    def parts(self, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks, of one shape, in rank order; read them before the next call."""
        parts = [torch.empty_like(part) for _ in range(self._size)]
        dist.all_gather(parts, part, group=self._group)
        return parts

    def parts_at_first(self, part: Tensor) -> list[Tensor] | None:
        """Return ``parts`` at the first rank; None at the others."""
        parts = [torch.empty_like(part) for _ in range(self._size)] if self._is_first else None
        dist.gather(part, parts, dst=self._first, group=self._group)
        return parts


class MemoryCommunicator(Communicator):
    """Collectives in memory that the ranks share; by torch for parts that are too large.

    Args:
        memory: of the ranks of ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, memory: SharedMemory) -> None:
        super().__init__(group)
        self.memory = memory

    @property
    def adds_in_order(self) -> bool:
        return True

    def sum(self, part: Tensor) -> Tensor:
        return self.memory.sum(part)

    def parts(self, part: Tensor) -> list[Tensor]:
        return self.memory.parts(part) if self.memory.fits(part) else super().parts(part)

    def parts_at_first(self, part: Tensor) -> list[Tensor] | None:
        if not self.memory.fits(part):
            return super().parts_at_first(part)
        parts = self.memory.parts(part)
        return parts if self._is_first else None


def make_communicator(group: dist.ProcessGroup, timeout_s: float) -> Communicator:
    """Return the fastest communicator that all ranks of ``group`` support, which call this at the same time.

    Args:
        timeout_s: time limit of a collective, as that of ``group``.
    """
    # Ranks with gloo compute on a CPU.
    memory = share_memory(group, timeout_s) if dist.get_backend(group) == "gloo" else None
    return Communicator(group) if memory is None else MemoryCommunicator(group, memory)


class SharedMemory:
    """View of the memory by a rank.

    A part stays where it was written until its writer has passed the next barrier: by then all have read it, because
    otherwise they would not have arrived there. So each rank uses two slots in turn.

    Args:
        memory: the same for all ranks, of ``size_of(len(pids))`` bytes.
        rank: index of this rank in ``pids``.
        pids: of all ranks.
        timeout_s: time after which a late rank counts as lost.
        wait_at_barrier: function of the compiled kernels.

    Raises:
        OSError: a process cannot be watched.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, pids: Sequence[int], timeout_s: float, wait_at_barrier: Any
    ) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        # How often each rank has arrived, written by ``barrier.cpp``.
        self._arrivals = self._bytes[: len(pids) * _COUNTER_BYTES].view(torch.int32)[:: _COUNTER_BYTES // 4]
        self._rank, self._size, self._timeout_s = rank, len(pids), timeout_s
        self._wait_at_barrier = wait_at_barrier
        self._number = 0
        self._watched_pids: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._watched_pids)
        self._ends = select.poll()
        for number, pid in enumerate(pids):
            if number != rank:
                descriptor = os.pidfd_open(pid)
                self._watched_pids[descriptor] = number
                self._ends.register(descriptor, select.POLLIN)
        self._slots = lru_cache(self._make_slots)

    def sum(self, part: Tensor) -> Tensor:
        """Sum the parts of all ranks, in rank order, in place; return ``part``.

        Raises:
            RuntimeError: a rank exited or timed out.
        """
        rows = part.view(-1) if part.is_contiguous() else part.reshape(-1)
        for piece in rows.split(SLOT_BYTES // part.element_size()):
            first, second, *others = self._exchange(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
        return part if rows.data_ptr() == part.data_ptr() else part.copy_(rows.view_as(part))

    def fits(self, part: Tensor) -> bool:
        """Whether ``parts`` supports parts of this size."""
        return part.numel() * part.element_size() <= SLOT_BYTES

    def parts(self, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks, in rank order and of equal shape; read them before the next call.

        Raises:
            RuntimeError: as ``sum``.
        """
        return [row.view_as(part) for row in self._exchange(part.reshape(-1))]

    def _exchange(self, row: Tensor) -> list[Tensor]:
        self._number += 1
        slots = self._slots(row.dtype, self._number % 2)
        rows = [slot[: len(row)] for slot in slots]
        rows[self._rank].copy_(row)
        if not self._wait_at_barrier(self._address, self._rank, self._size, self._number, _CHECK_INTERVAL_MS):
            self._await_all()
        return rows

    def _await_all(self) -> None:
        give_up_at = time.monotonic() + self._timeout_s
        while not self._wait_at_barrier(self._address, self._rank, self._size, self._number, _CHECK_INTERVAL_MS):
            # Counters are read after exits, because an exited process cannot arrive any more.
            for rank in [self._watched_pids[descriptor] for descriptor, _ in self._ends.poll(0)]:
                if not self._has_come(rank):
                    raise RuntimeError(f"rank {rank} of {self._size} is gone")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"a rank of {self._size} has not come for {self._timeout_s:g} s")

    def _has_come(self, rank: int) -> bool:
        """Whether ``rank`` has arrived at this barrier, or at the next one since. Numbers wrap around, as in
        ``barrier.cpp``.
        """
        return (int(self._arrivals[rank]) - self._number) % _NUM_NUMBERS < _NUM_NUMBERS // 2

    def _make_slots(self, dtype: torch.dtype, turn: int) -> list[Tensor]:
        """Return the slots of all ranks, ``[SLOT_BYTES / element size]`` each."""
        start = self._size * (_COUNTER_BYTES + turn * SLOT_BYTES)
        return list(self._bytes[start : start + self._size * SLOT_BYTES].view(dtype).chunk(self._size))


def size_of(num_ranks: int) -> int:
    """Return the bytes of the memory: a counter and two slots per rank."""
    return num_ranks * (_COUNTER_BYTES + 2 * SLOT_BYTES)


def share_memory(group: dist.ProcessGroup, timeout_s: float) -> SharedMemory | None:
    """Let all ranks of ``group``, which call this at the same time, share memory.

    Returns None at all of them if one cannot: without the compiled kernels, on another host, or if processes cannot
    access each other's descriptors. A single rank has no partner to sum with.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return None
    wait_at_barrier = native.library("wait_at_barrier")
    mark = secrets.randbits(62)
    descriptor = _make_file(size_of(size), mark) if rank == 0 and wait_at_barrier is not None else _MISSING
    try:
        offer = torch.tensor([os.getpid(), descriptor, mark])
        offers = [torch.empty_like(offer) for _ in range(size)]
        dist.all_gather(offers, offer, group=group)
        pids = [int(row[0]) for row in offers]
        memory = None
        if wait_at_barrier is not None and offers[0][1] != _MISSING:
            memory = _open(f"/proc/{pids[0]}/fd/{int(offers[0][1])}", int(offers[0][2]), size_of(size))
        shared = None
        if memory is not None:
            with suppress(OSError):
                shared = SharedMemory(memory, rank, pids, timeout_s, wait_at_barrier)
        can = torch.tensor([shared is not None])
        dist.all_reduce(can, dist.ReduceOp.MIN, group=group)
        return shared if can else None
    finally:
        if descriptor != _MISSING:
            os.close(descriptor)


def _make_file(size: int, mark: int) -> int:
    """Create a file in memory that ends with ``mark``; return its descriptor, or ``_MISSING`` if that fails."""
    try:
        descriptor = os.memfd_create("penstock-sums")
    except OSError:
        return _MISSING
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, mark.to_bytes(8, "little"), size - 8)
    except OSError:
        os.close(descriptor)
        return _MISSING
    return descriptor


def _open(path: str, mark: int, size: int) -> mmap.mmap | None:
    """Map another process's file if it ends with ``mark``, because processes of other hosts have the same ids."""
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
