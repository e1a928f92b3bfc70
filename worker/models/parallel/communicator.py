"""The collectives of ranks that compute a step together: by torch's group, or in memory that they share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .shared_memory import SharedMemory, share_memory


class Communicator:
    """Collectives by torch. Each waits for the other ranks, and raises ``RuntimeError`` once one is gone or silent.

    Args:
        group: theirs; None for torch's default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._first = dist.get_process_group_ranks(group)[0]
        self._size = dist.get_world_size(group)
        self._is_first = dist.get_rank(group) == 0

    @property
    def adds_in_order(self) -> bool:
        """Parts are added in the same order whatever their shape: of two there is but one."""
        return self._size <= 2

    def sum(self, part: Tensor) -> Tensor:
        """Add up the parts of all ranks, of one shape, in place; return ``part``."""
        dist.all_reduce(part, group=self._group)
        return part

    def parts(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, of one shape, in their order; to be read before the next call."""
        parts = [torch.empty_like(part) for _ in range(self._size)]
        dist.all_gather(parts, part, group=self._group)
        return parts

    def parts_at_first(self, part: Tensor) -> list[Tensor] | None:
        """As ``parts``, for the first rank; None for the others."""
        parts = [torch.empty_like(part) for _ in range(self._size)] if self._is_first else None
        dist.gather(part, parts, dst=self._first, group=self._group)
        return parts


class MemoryCommunicator(Communicator):
    """The same in memory that the ranks share; parts that it has no room for go as ever.

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
        return self.memory.parts(part) if self.memory.has_room(part) else super().parts(part)

    def parts_at_first(self, part: Tensor) -> list[Tensor] | None:
        if not self.memory.has_room(part):
            return super().parts_at_first(part)
        parts = self.memory.parts(part)
        return parts if self._is_first else None


def make_communicator(group: dist.ProcessGroup, timeout_s: float) -> Communicator:
    """The quickest that all ranks of ``group`` have, which call this at the same time.

    Args:
        timeout_s: how long a rank may be silent in a collective; that of ``group``.
    """
    # gloo's ranks compute on a CPU.
    memory = share_memory(group, timeout_s) if dist.get_backend(group) == "gloo" else None
    return Communicator(group) if memory is None else MemoryCommunicator(group, memory)
