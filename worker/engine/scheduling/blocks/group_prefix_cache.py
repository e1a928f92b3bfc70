"""Prefix cache of a model whose layers keep different parts of a request."""

from __future__ import annotations

from collections.abc import Iterable

from ..image_spans import uncut_hit
from ..request import Request
from .block_groups import BlockGroups, group_key
from .block_pool import BlockPool, InvariantError
from .prefix_cache import BlockHashCache


class GroupHashCache(BlockHashCache):
    """A ``BlockHashCache`` per group of layers. A hit is a prefix from which all groups can continue.

    Layers without a window need all blocks of the prefix, and layers with a window the blocks that the next token
    attends to.
    """

    def __init__(self, block_pool: BlockPool, groups: BlockGroups) -> None:
        super().__init__(block_pool)
        self._groups = groups
        self._null_block = block_pool.num_blocks

    def find(self, request: Request) -> list[int]:
        """Return the blocks of the first group, after null blocks if it has a window. Each other group has as many."""
        if not request.reads_prefix_cache:
            return []
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        hashes = request.block_hashes[:num_blocks]
        count = self._num_cached(hashes)
        while request.images and (whole := uncut_hit(request.images, count, self._block_size)) < count:
            count = self._num_cached(hashes[:whole])
        first = self._groups.first_needed(self._groups.windows[0], count * self._block_size)
        return [self._null_block] * first + self._pool.find(hashes[first:count])

    def record_computed(self, request: Request, num_new_tokens: int) -> None:
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        self._hash_blocks(request, end)
        for group, table in enumerate(_tables_of(request)):
            for index in range(first, end):
                self._pool.set_hash(table[index], group_key(request.block_hashes[index], group))

    def check_invariants(self, running: Iterable[Request]) -> None:
        for request in running:
            num_full = request.num_computed_tokens // self._block_size
            for group, table in enumerate(_tables_of(request)):
                for index, block in enumerate(table):
                    block_hash = None if block == self._null_block else self._pool.hash_of(block)
                    is_correct = index < num_full and block_hash == group_key(request.block_hashes[index], group)
                    if block_hash is not None and not is_correct:
                        raise InvariantError(f"block {block} of request {request.request_id} has a wrong hash")

    def _num_cached(self, hashes: list[bytes]) -> int:
        """Return how many of the first blocks are cached in all groups that need them."""
        count = len(hashes)
        for group, window in enumerate(self._groups.windows):
            if window is None:
                count = len(self._pool.find(group_key(block_hash, group) for block_hash in hashes[:count]))
        windowed = [(group, window) for group, window in enumerate(self._groups.windows) if window is not None]
        while count:
            missing = self._last_missing(hashes, count, windowed)
            if missing is None:
                break
            # Every count above ``missing`` needs this block, so continue with the blocks before it.
            count = missing
        return count

    def _last_missing(self, hashes: list[bytes], count: int, windowed: list[tuple[int, int]]) -> int | None:
        """Return the index of a block that a group needs to continue after ``count`` but lacks; None if it has all."""
        for group, window in windowed:
            first = self._groups.first_needed(window, count * self._block_size)
            for index in range(count - 1, first - 1, -1):
                if not self._pool.find((group_key(hashes[index], group),)):
                    return index
        return None


def _tables_of(request: Request) -> list[list[int]]:
    return [] if request.group_tables is None else request.group_tables.tables
