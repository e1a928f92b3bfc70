"""The communication of the ranks of one model while it computes, and the modules that combine their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....shared.errors import ConfigurationError
from .communicator import Communicator, make_communicator
from .layout import ParallelLayout
from .meeting import Meeting

_LOADING_TIMEOUT_S = 3600
# A rank that waits longer in a collective ends. During steps the worker process's stall watch acts earlier. This limit
# is for loading, in which one rank may read its files much later than another.
COLLECTIVE_TIMEOUT_S = 600.0


class RankGroups:
    """The place of a rank in the layout, and the collectives of the model.

    Every rank of the default group creates one at the same time, since groups are created together. All collectives
    wait for the other ranks, and raise ``RuntimeError`` of torch if one exits or times out after ``timeout_s``.

    Args:
        layout: how the ranks of torch's default group, which is initialised, share the model.
        rank: of this process in the default group.
        timeout_s: time limit of a collective while steps are computed.

    Attributes:
        stage: communicator of the ranks of this stage; None if the stage has one rank.

    Raises:
        ConfigurationError: the default group has another size than the layout.
    """

    def __init__(self, layout: ParallelLayout, rank: int, *, timeout_s: float) -> None:
        if dist.get_world_size() != layout.world_size:
            raise ConfigurationError(
                f"tensor_parallel_size {layout.tensor} and pipeline_parallel_size {layout.pipeline} are "
                f"{layout.world_size} ranks, but {dist.get_world_size()} have met"
            )
        self.layout = layout
        self.rank = rank
        timeout = timedelta(seconds=timeout_s)
        # torch requires that all ranks create all groups.
        stages = layout.tensor_groups if layout.tensor > 1 else ()
        own = [group for ranks in stages if (group := _new_group(timeout, list(ranks))) is not None]
        self.stage: Communicator | None = make_communicator(own[0], timeout_s) if own else None
        # For messages while the model is loaded, when ranks may wait for another's disk.
        self._loading = _new_group(timedelta(seconds=_LOADING_TIMEOUT_S), backend="gloo")
        # The way back has a separate group: NCCL orders everything that two ranks of a group send each other, so a step
        # on its way forward would wait for one on its way back, which waits for it.
        self._onwards = _new_group(timeout) if layout.pipeline > 1 else None
        self._back = _new_group(timeout) if layout.pipeline > 1 else None
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @classmethod
    def join(
        cls,
        meeting: Meeting,
        layout: ParallelLayout,
        rank: int,
        device: str,
        timeout_s: float,
        device_index: int,
    ) -> RankGroups:
        """Wait for the other ranks and return the process groups.

        Args:
            device: "cpu", which uses gloo, or "cuda", which uses NCCL.
            device_index: number of the visible GPU of this rank.

        Raises:
            RuntimeError: the ranks do not connect within ``timeout_s``, or one has exited.
        """
        timeout = timedelta(seconds=timeout_s)
        backend = "gloo"
        if device == "cuda":
            backend = "nccl"
            torch.cuda.set_device(device_index)
        store = meeting.open_store(layout.world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
        return cls(layout, rank, timeout_s=timeout_s)

    @property
    def tensor_rank(self) -> int:
        return self.layout.tensor_rank(self.rank)

    @property
    def pipeline_rank(self) -> int:
        return self.layout.pipeline_rank(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.layout.pipeline - 1

    @property
    def adds_in_order(self) -> bool:
        """Whether a sum has the same bits whatever else is summed with it."""
        return self.stage is None or self.stage.adds_in_order

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum ``part`` over the ranks of the stage, in place; return it."""
        return part if self.stage is None else self.stage.sum(part)

    def gather(self, part: Tensor) -> Tensor:
        """Concatenate the parts ``[..., V / tensor]`` of the ranks of the stage to ``[..., V]``.

        Only the stage's first rank gets them; the others get zeros of that shape, which must not be used.
        """
        if self.stage is None:
            return part
        parts = self.stage.parts_at_first(part.contiguous())
        if parts is None:
            return part.new_zeros(1).expand(*part.shape[:-1], part.shape[-1] * self.layout.tensor)
        return torch.cat(parts, dim=-1)

    def send_on(self, tensor: Tensor) -> None:
        """Send ``tensor`` to the next stage, or from the last one back to the first, without waiting for its arrival.

        Earlier sends are waited for once as many steps are in flight as there are stages.
        """
        tensor = tensor.contiguous()
        group = self._back if self.is_last_stage else self._onwards
        work = dist.isend(tensor, self._neighbour(1), group=group)
        if work is not None:
            self._sent.append((work, tensor))
        while len(self._sent) > self.layout.pipeline:
            self._sent.popleft()[0].wait()

    def receive(self, into: Tensor) -> Tensor:
        """Fill ``into`` with the tensor from the previous stage, for the first stage from the last; return it."""
        dist.recv(into, self._neighbour(-1), group=self._back if self.is_first_stage else self._onwards)
        return into

    def of_rank_zero(self, value: float) -> float:
        """Return rank 0's ``value``, so that all ranks decide alike while the model is loaded.

        Waits up to an hour, because ranks may read their files at different speeds.
        """
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, src=0, group=self._loading)
        return float(shared.item())

    def _neighbour(self, offset: int) -> int:
        return self.layout.rank_at((self.pipeline_rank + offset) % self.layout.pipeline, self.tensor_rank)


def _new_group(
    timeout: timedelta, ranks: list[int] | None = None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create a group of ``ranks``, else of all; return None if this rank is not in it."""
    group = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


class SumOverRanks(nn.Module):
    """The sum of the outputs of ``inner`` over the ranks of the stage, each of which computes a summand.

    This works for any module that is linear in its last weight: a linear layer, a feed-forward part, or its experts,
    with any gates that are the same on all ranks.
    """

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        # Some blocks of experts also return the choices of their router.
        return (self.groups.all_reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.groups.all_reduce(out)


class ConcatOverRanks(nn.Module):
    """The concatenated outputs of ``inner`` over the ranks of the stage; complete only at the first rank."""

    def __init__(self, inner: nn.Module, groups: RankGroups) -> None:
        super().__init__()
        self.inner = inner
        self.groups = groups

    def forward(self, inputs: Tensor) -> Tensor:
        return self.groups.gather(self.inner(inputs))


def local_module(module: Any) -> Any:
    """Return the module with the weights: ``module``, or the one inside a wrapper that combines results of ranks."""
    return module.inner if isinstance(module, SumOverRanks | ConcatOverRanks) else module


def named_local_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in ``module`` as ``named_modules`` does, by their names in a model without wrappers."""
    wrappers: list[str] = []
    for path, child in module.named_modules(prefix=prefix):
        wrapper = next((each for each in wrappers if path.startswith(f"{each}.inner")), None)
        if isinstance(child, SumOverRanks | ConcatOverRanks):
            wrappers.append(path)
        else:
            yield (path if wrapper is None else wrapper + path.removeprefix(f"{wrapper}.inner")), child
