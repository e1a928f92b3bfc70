"""The collectives of ranks that compute a step together: by torch's group, or in shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .shared_memory import SharedMemory, share_memory


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
