"""Where the ranks of an engine find each other: a file in memory, which has no name and ends with them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ...models.parallel.groups import RankGroups
from ...models.parallel.layout import ParallelLayout

# Of collectives. Whoever waits longer for a rank ends. While steps are made the worker process's stall watch is sooner;
# this is for the load, in which one rank may read its files much later than another.
COLLECTIVE_TIMEOUT_S = 600.0


def make_rendezvous() -> int:
    """Return the descriptor of a new file, for ``join`` of all ranks."""
    return os.memfd_create("penstock-ranks")


def join(descriptor: int, layout: ParallelLayout, rank: int, device: str, timeout_s: float) -> RankGroups:
    """Meet the other ranks, and return what they say to each other by; waits for all of them.

    ``descriptor`` is not to be closed any more. When torch's store is destroyed, whenever that is, it opens the file by
    this number once more, and writes into it: another's file, if that has got the number.

    Args:
        device: "cpu", where gloo speaks for them, or "cuda": rank ``n`` has the ``n``-th of the visible GPUs.

    Raises:
        RuntimeError: they do not come within ``timeout_s``, or one is gone.
    """
    timeout = timedelta(seconds=timeout_s)
    # All are on this host, and nobody else has to hear them.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    store = FileStore(f"/proc/self/fd/{descriptor}", layout.world_size)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout)
    return RankGroups(layout, rank, timeout_s=timeout_s)
