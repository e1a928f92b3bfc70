"""Loads of waiting requests with blocks that can be read from the KV offload.

If a request could be admitted, and the tiers have more of its blocks than the KV cache, it leaves the queue until they
have been read, and then returns to its place. Other requests continue meanwhile. Blocks that were read are free blocks
with a hash, like those of earlier requests, so admission finds and counts them without knowing their origin.

A request has one load each time that it waits. If its first missing block is being read for another request, it waits
for that load, and then checks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ....shared.stats import KVOffloadStats
from ..scheduling.block_pool import BlockPool
from ..scheduling.ordering import RequestQueue
from ..scheduling.prefix_cache import PrefixCache
from ..scheduling.request import Request
from .offload import KVOffload
from .transfers import MAX_LOADS, Load


class OffloadLoads:
    """Implements ``scheduling.admission.BlockLoads`` with the KV offload.

    Args:
        num_batches_ahead: number of batches that may be in flight when one is scheduled. They may still write to blocks
            that were freed since, so nothing is read into a block before they have landed.
        max_num_seqs: limit on running requests.
    """

    def __init__(
        self,
        offload: KVOffload,
        num_batches_ahead: int,
        block_pool: BlockPool,
        prefix_cache: PrefixCache,
        max_num_seqs: int,
    ) -> None:
        self._offload = offload
        self._num_batches_ahead = num_batches_ahead
        self._block_pool = block_pool
        self._prefix_cache = prefix_cache
        self._max_num_seqs = max_num_seqs
        self._loads: list[Load] = []
        # Requests in the queue that have had their load.
        self._checked_ids: set[str] = set()

    def attach(self, running: RequestQueue, waiting: RequestQueue) -> None:
        self._running, self._waiting = running, waiting

    def begin_step(self) -> None:
        self.collect()
        self._start_delayed_loads()
        self._begin_loads()

    def collect(self) -> None:
        """Set the hashes of blocks of finished loads, and requeue their requests."""
        for load in [load for load in self._loads if load.has_ended]:
            self._loads.remove(load)
            for block, block_hash in zip(load.blocks[: load.num_loaded], load.hashes, strict=False):
                self._block_pool.set_hash(block, block_hash)
            self._block_pool.free(load.prefix_blocks + load.blocks)
            self._offload.count_loaded(load.num_loaded * self._block_pool.block_size)
            self._requeue(load.requests)
        for load in self._loads:
            if load.is_overdue:  # its blocks stay reserved until the thread has finished with it
                self._requeue(load.requests)

    def requeue(self, request_ids: Iterable[str]) -> None:
        self._requeue(request for request in self.requests() if request.request_id in request_ids)

    def forget(self, request_id: str) -> None:
        self._checked_ids.discard(request_id)

    def wait(self, timeout_s: float) -> None:
        self._offload.loader.wait(timeout_s)

    def drain(self) -> None:
        """Wait until no block is being read or written, or the loads are overdue because a disk hangs."""
        while any(not load.is_overdue and not load.has_ended for load in self._loads):
            self._start_delayed_loads()
            self.wait(0.01)
        self.collect()
        self._offload.write_behind.stop()

    def clear_storage(self) -> None:
        self._offload.clear()

    def requests(self) -> Iterable[Request]:
        return (request for load in self._loads for request in load.requests)

    def block_tables(self) -> Iterable[list[int]]:
        return (load.prefix_blocks + load.blocks for load in self._loads)

    def stats(self) -> KVOffloadStats:
        return self._offload.stats()

    def _begin_loads(self) -> None:
        """Begin the loads of the next requests that could be admitted now, in order."""
        num_free_seqs = self._max_num_seqs - len(self._running) - sum(1 for _ in self.requests())
        for request in list(islice(self._waiting, max(0, num_free_seqs))):
            if request.num_in_flight_tokens:
                return
            if request.request_id not in self._checked_ids and not self._begin_load(request):
                return

    def _begin_load(self, request: Request) -> bool:
        """Begin the load of ``request``, if it needs one; return False if it could not be admitted yet."""
        cached = self._prefix_cache.find(request)
        free = self._block_pool.num_free - self._block_pool.num_free_among(cached)
        if self._block_pool.blocks_for(request.num_tokens) - len(cached) > free:
            return False
        num_blocks = (request.num_tokens - 1) // self._block_pool.block_size
        missing = request.block_hashes[len(cached) : num_blocks] if request.reads_prefix_cache else []
        for load in self._loads:
            if missing and missing[0] in load.hashes and not load.is_overdue:
                self._waiting.remove(request)
                load.requests.append(request)
                return True
        self._checked_ids.add(request.request_id)
        # Reserve a block for each running request.
        max_blocks = free - len(self._running) if len(self._loads) < MAX_LOADS else 0
        count = min(self._offload.look_up(missing, self._block_pool.block_size), max_blocks)
        if count > 0:
            self._block_pool.hold(cached)
            self._waiting.remove(request)
            blocks = self._block_pool.allocate(count)
            self._loads.append(Load(missing[:count], blocks, cached, [request], self._num_batches_ahead))
            if not self._num_batches_ahead:
                self._offload.loader.begin(self._loads[-1])
        return True

    def _start_delayed_loads(self) -> None:
        """Start loads that had to wait for batches in flight, one of which has landed."""
        for load in self._loads:
            if load.num_steps_to_wait:
                load.num_steps_to_wait -= 1
                if not load.num_steps_to_wait:
                    self._offload.loader.begin(load)

    def _requeue(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            for load in self._loads:
                load.requests = [other for other in load.requests if other is not request]
            self._waiting.add(request)
