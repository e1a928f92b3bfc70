"""Block tables: the blocks that each request holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..request import Request
from .block_pool import BlockPool


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
        """Do nothing: ``invariants.check_tokens`` verifies the table."""
