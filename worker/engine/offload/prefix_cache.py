"""Prefix cache of an engine with KV offload."""

from __future__ import annotations

from ..scheduling.blocks.block_pool import BlockPool
from ..scheduling.blocks.prefix_cache import BlockHashCache
from ..scheduling.request import Request
from .write_behind import WriteBehind


class OffloadingPrefixCache(BlockHashCache):
    """A ``BlockHashCache`` that also queues each new findable block for writing."""

    def __init__(self, block_pool: BlockPool, write_behind: WriteBehind) -> None:
        super().__init__(block_pool)
        self._write_behind = write_behind

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        super().record_computed(request, num_new_tokens)
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        for index in range(first, end):
            block = request.block_table[index]
            # Of two blocks with the same contents only one has the hash; one copy suffices.
            if self._pool.hash_of(block) is not None:
                self._write_behind.enqueue(block, request.block_hashes[index])
