"""Block tables: the blocks that each request holds, with one table, or with one per group of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .block_pool import BlockGroups, BlockPool, GroupTables, InvariantError, group_key
from .request import Request


class BlockTables(Protocol):
    """Assigns blocks of ``pool`` to requests.

    Attributes:
        blocks_at_once: how many blocks a request takes when it needs another one.
    """

    pool: BlockPool
    blocks_at_once: int

    def max_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request may hold at any time until it has ``num_tokens`` tokens."""
        ...

    def can_admit(self, request: Request, cached: list[int]) -> bool:
        """Return whether enough blocks are free for ``admit``."""
        ...

    def admit(self, request: Request, cached: list[int]) -> None:
        """Hold the ``cached`` blocks that ``PrefixCache.find`` has just returned, and allocate blocks for the other
        known tokens.
        """
        ...

    def token_capacity(self, request: Request) -> int:
        """Return for how many tokens the request has had blocks, including blocks that it has freed."""
        ...

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks ``grow`` would allocate."""
        ...

    def grow(self, request: Request, num_tokens: int) -> None:
        """Allocate the blocks missing for ``num_tokens`` tokens in total. Enough blocks must be free."""
        ...

    def free_unneeded(self, request: Request) -> None:
        """Free blocks that no token from ``num_computed_tokens`` on attends to."""
        ...

    def release(self, request: Request) -> None:
        """Free all blocks of the request."""
        ...

    def tables_of(self, request: Request) -> Iterable[list[int]]:
        """Return the blocks that the request holds, per table."""
        ...

    def check_invariants(self, request: Request) -> None:
        """Verify the tables of a running request.

        Raises:
            InvariantError: a block is missing, or was freed too early.
        """
        ...


class SingleBlockTable:
    """Implements ``BlockTables`` with one table: a block holds its tokens for all layers until the request ends."""

    blocks_at_once = 1

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def max_blocks_for(self, num_tokens: int) -> int:
        return self.pool.blocks_for(num_tokens)

    def can_admit(self, request: Request, cached: list[int]) -> bool:
        num_blocks = self.pool.blocks_for(request.num_tokens) - len(cached)
        return num_blocks <= self.pool.num_free - self.pool.num_free_among(cached)

    def admit(self, request: Request, cached: list[int]) -> None:
        self.pool.hold(cached)
        num_blocks = self.pool.blocks_for(request.num_tokens) - len(cached)
        request.block_table = cached + self.pool.allocate(num_blocks)

    def token_capacity(self, request: Request) -> int:
        return len(request.block_table) * self.pool.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, self.pool.blocks_for(num_tokens) - len(request.block_table))

    def grow(self, request: Request, num_tokens: int) -> None:
        num_blocks = self.num_missing(request, num_tokens)
        if num_blocks:
            request.block_table += self.pool.allocate(num_blocks)

    def free_unneeded(self, request: Request) -> None:
        """Do nothing: every layer attends to all blocks."""

    def release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []

    def tables_of(self, request: Request) -> Iterable[list[int]]:
        return (request.block_table,)

    def check_invariants(self, request: Request) -> None:
        """Do nothing: ``placement.check_tokens`` verifies the table."""


class GroupedTables:
    """Implements ``BlockTables`` with a table for each of ``groups``, all with blocks of one pool.

    Entries of freed blocks point to a null block after those of the pool, which is never written to.
    ``request.block_table`` is the table of the first group.

    On admission a request gets all blocks of layers without a window, and of layers with a window as many as a step may
    compute; from then on it frees as many of these as it allocates. So a prompt never lacks blocks after its admission.
    """

    def __init__(self, pool: BlockPool, groups: BlockGroups) -> None:
        self.pool = pool
        self._groups = groups
        self.null_block = pool.num_blocks
        self.blocks_at_once = len(groups)

    def max_blocks_for(self, num_tokens: int) -> int:
        return self._groups.max_blocks_for(num_tokens)

    def can_admit(self, request: Request, cached: list[int]) -> bool:
        grouped = self._cached_tables(request, len(cached))
        num_blocks = sum(self._lengths_at_first(request, len(cached))) - len(grouped.tables) * len(cached)
        blocks = [block for table in self._held_blocks(grouped) for block in table]
        return num_blocks <= self.pool.num_free - self.pool.num_free_among(blocks)

    def admit(self, request: Request, cached: list[int]) -> None:
        grouped = self._cached_tables(request, len(cached))
        for blocks in self._held_blocks(grouped):
            self.pool.hold(blocks)
        for table, length in zip(grouped.tables, self._lengths_at_first(request, len(cached)), strict=True):
            table += self.pool.allocate(length - len(table))
        request.group_tables, request.block_table = grouped, grouped.tables[0]

    def token_capacity(self, request: Request) -> int:
        # Groups with windows come last. They have fewer blocks while a prompt is computed, all the same number.
        return len(_tables_of(request).tables[-1]) * self.pool.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        num_blocks = self.pool.blocks_for(num_tokens)
        return sum(max(0, num_blocks - len(table)) for table in _tables_of(request).tables)

    def grow(self, request: Request, num_tokens: int) -> None:
        grouped, num_blocks = _tables_of(request), self.pool.blocks_for(num_tokens)
        for table in grouped.tables:
            if len(table) < num_blocks:
                table += self.pool.allocate(num_blocks - len(table))
                grouped.version += 1

    def free_unneeded(self, request: Request) -> None:
        grouped = _tables_of(request)
        for group, window in enumerate(self._groups.windows):
            first = grouped.firsts[group]
            end = self._groups.first_needed(window, request.num_computed_tokens)
            if end > first:
                table = grouped.tables[group]
                self.pool.free(table[first:end])
                table[first:end] = [self.null_block] * (end - first)
                grouped.firsts[group] = end
                grouped.version += 1

    def release(self, request: Request) -> None:
        for blocks in self._held_blocks(_tables_of(request)):
            self.pool.free(blocks)
        request.block_table, request.group_tables = [], None

    def tables_of(self, request: Request) -> Iterable[list[int]]:
        return self._held_blocks(_tables_of(request))

    def check_invariants(self, request: Request) -> None:
        grouped, name = _tables_of(request), request.request_id
        if grouped.tables[0] is not request.block_table:
            raise InvariantError(f"request {name} has two tables of its first group")
        num_blocks = self.pool.blocks_for(request.num_computed_tokens)
        for window, table, first in zip(self._groups.windows, grouped.tables, grouped.firsts, strict=True):
            if len(table) < num_blocks:
                raise InvariantError(f"request {name} has fewer blocks than computed tokens")
            if first > self._groups.first_needed(window, request.num_computed_tokens):
                raise InvariantError(f"request {name} has freed blocks that it still needs")
            if any((block == self.null_block) != (index < first) for index, block in enumerate(table)):
                raise InvariantError(f"request {name} has the null block in the wrong places")

    def _lengths_at_first(self, request: Request, num_cached: int) -> list[int]:
        """Return the lengths of the tables of a request that is admitted with ``num_cached`` cached blocks."""
        whole = self.pool.blocks_for(request.num_tokens)
        ahead = self.pool.blocks_for(num_cached * self.pool.block_size + self._groups.max_ahead)
        return [whole if window is None else min(whole, ahead) for window in self._groups.windows]

    def _cached_tables(self, request: Request, num_cached: int) -> GroupTables:
        """Return tables of the first ``num_cached`` blocks, without the blocks before a group's window."""
        tables: list[list[int]] = []
        firsts: list[int] = []
        for group, window in enumerate(self._groups.windows):
            first = self._groups.first_needed(window, num_cached * self.pool.block_size)
            keys = [group_key(block_hash, group) for block_hash in request.block_hashes[first:num_cached]]
            blocks = self.pool.find(keys)
            if len(blocks) != num_cached - first:
                raise InvariantError(f"cached blocks of request {request.request_id} are missing from the pool")
            tables.append([self.null_block] * first + blocks)
            firsts.append(first)
        return GroupTables(tables, firsts)

    def _held_blocks(self, grouped: GroupTables) -> Iterable[list[int]]:
        return [table[first:] for table, first in zip(grouped.tables, grouped.firsts, strict=True)]


def _tables_of(request: Request) -> GroupTables:
    if request.group_tables is None:
        raise InvariantError(f"request {request.request_id} has no block tables")
    return request.group_tables
