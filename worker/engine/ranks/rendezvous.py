"""The rendezvous of an engine's ranks: an anonymous file in memory, which exists as long as they do."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ...models.parallel.groups import RankGroups
from ...models.parallel.layout import ParallelLayout

# A rank that waits longer in a collective ends. During steps the worker process's stall watch acts earlier. This limit
# is for loading, in which one rank may read its files much later than another.
COLLECTIVE_TIMEOUT_S = 600.0


def make_rendezvous() -> int:
    """Return the descriptor of a new file, which all ranks pass to ``join``."""
    return os.memfd_create("penstock-ranks")


def join(descriptor: int, layout: ParallelLayout, rank: int, device: str, timeout_s: float) -> RankGroups:
    """Wait for the other ranks and return the process groups.

    Do not close ``descriptor`` afterwards. When torch's store is destroyed, it opens the file by this number again and
    writes into it, which would be another file if the number had been reused.

    Args:
        device: "cpu", which uses gloo, or "cuda", which uses NCCL and the ``n``-th visible GPU for rank ``n``.

    Raises:
        RuntimeError: the ranks do not connect within ``timeout_s``, or one has exited.
    """
    timeout = timedelta(seconds=timeout_s)
    # All ranks are on this host, so they use the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    store = FileStore(f"/proc/self/fd/{descriptor}", layout.world_size)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    return RankGroups(layout, rank, timeout_s=timeout_s)
