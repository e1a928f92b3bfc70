"""The prefix cache of a model whose layers keep different parts of a request."""

from __future__ import annotations

from collections.abc import Iterable

from ..image_spans import whole_hit
from ..request import Request
from .block_groups import BlockGroups, key_of
from .block_pool import BlockPool, InvariantError
from .prefix_cache import BlockHashCache


class GroupHashCache(BlockHashCache):
    """As ``BlockHashCache``. What all groups can go on from is found: of layers that see everything all blocks up to
    there, of layers with a window those at which the next token looks.
    """

    def __init__(self, block_pool: BlockPool, groups: BlockGroups) -> None:
        super().__init__(block_pool)
        self._groups = groups
        self._null_block = block_pool.num_blocks

    def find(self, request: Request) -> list[int]:
        """The blocks of the first group, null blocks in front where it has a window; of the others as many."""
        if not request.reads_prefix_cache:
            return []
        num_blocks = (request.num_tokens - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        hashes = request.block_hashes[:num_blocks]
        count = self._num_found(hashes)
        while request.images and (whole := whole_hit(request.images, count, self._block_size)) < count:
            count = self._num_found(hashes[:whole])
        first = self._groups.first_needed(self._groups.windows[0], count * self._block_size)
        return [self._null_block] * first + self._pool.find(hashes[first:count])

    def note_computed(self, request: Request, num_new_tokens: int) -> None:
        first = (request.num_computed_tokens - num_new_tokens) // self._block_size
        end = request.num_computed_tokens // self._block_size
        self._hash_blocks(request, end)
        for group, table in enumerate(_tables_of(request)):
            for index in range(first, end):
                self._pool.set_hash(table[index], key_of(request.block_hashes[index], group))

    def check_invariants(self, running: Iterable[Request]) -> None:
        for request in running:
            num_full = request.num_computed_tokens // self._block_size
            for group, table in enumerate(_tables_of(request)):
                for index, block in enumerate(table):
                    known = None if block == self._null_block else self._pool.hash_of(block)
                    is_right = index < num_full and known == key_of(request.block_hashes[index], group)
                    if known is not None and not is_right:
                        raise InvariantError(f"block {block} of request {request.request_id} is known by a wrong hash")

    def _num_found(self, hashes: list[bytes]) -> int:
        """How many of the first blocks all groups have, as far as they need them."""
        count = len(hashes)
        for group, window in enumerate(self._groups.windows):
            if window is None:
                count = len(self._pool.find(key_of(block_hash, group) for block_hash in hashes[:count]))
        windowed = [(group, window) for group, window in enumerate(self._groups.windows) if window is not None]
        while count:
            missing = self._last_missing(hashes, count, windowed)
            if missing is None:
                break
            # It is among those that are needed for every number from here down to what comes before it.
            count = missing
        return count

    def _last_missing(self, hashes: list[bytes], count: int, windowed: list[tuple[int, int]]) -> int | None:
        """Of the blocks that are needed to go on after ``count``, one that a group lacks; None if all are there."""
        for group, window in windowed:
            first = self._groups.first_needed(window, count * self._block_size)
            for index in range(count - 1, first - 1, -1):
                if not self._pool.find((key_of(hashes[index], group),)):
                    return index
        return None


def _tables_of(request: Request) -> list[list[int]]:
    return [] if request.group_tables is None else request.group_tables.tables
