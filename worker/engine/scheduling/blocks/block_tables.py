"""Which blocks each request holds, as the scheduler asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..request import Request
from .block_pool import BlockPool


class BlockTables(Protocol):
    """Gives requests blocks of ``pool``.

    Attributes:
        blocks_at_once: how many blocks a request takes when it needs another one.
    """

    pool: BlockPool
    blocks_at_once: int

    def most_blocks(self, num_tokens: int) -> int:
        """How many blocks a request may hold at once on its way to ``num_tokens`` tokens."""
        ...

    def can_admit(self, request: Request, cached: list[int]) -> bool:
        """Whether blocks are free for all that ``admit`` takes."""
        ...

    def admit(self, request: Request, cached: list[int]) -> None:
        """Hold the blocks of the first tokens, which ``PrefixCache.find`` has just named, and take others for the rest
        of the known ones.
        """
        ...

    def num_tokens_in(self, request: Request) -> int:
        """Of how many tokens the request has blocks, those included that it no longer needs."""
        ...

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """How many blocks ``grow`` would take."""
        ...

    def grow(self, request: Request, num_tokens: int) -> None:
        """Take what is missing for ``num_tokens`` tokens in all; so many blocks are free."""
        ...

    def give_back(self, request: Request) -> None:
        """Let go of blocks that no token from ``num_computed_tokens`` on will look at."""
        ...

    def release(self, request: Request) -> None:
        """Let go of all."""
        ...

    def tables_of(self, request: Request) -> Iterable[list[int]]:
        """The blocks that the request holds, in as many tables as there are."""
        ...

    def check_invariants(self, request: Request) -> None:
        """Verify the tables of a request that runs.

        Raises:
            InvariantError: something is missing, or was given back too early.
        """
        ...


class OneTable:
    """See ``BlockTables``: a block of a request holds its tokens of all layers, and stays until the request ends."""

    blocks_at_once = 1

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def most_blocks(self, num_tokens: int) -> int:
        return self.pool.blocks_for(num_tokens)

    def can_admit(self, request: Request, cached: list[int]) -> bool:
        num_blocks = self.pool.blocks_for(request.num_tokens) - len(cached)
        return num_blocks <= self.pool.num_free - self.pool.num_free_among(cached)

    def admit(self, request: Request, cached: list[int]) -> None:
        self.pool.hold(cached)
        num_blocks = self.pool.blocks_for(request.num_tokens) - len(cached)
        request.block_table = cached + self.pool.allocate(num_blocks)

    def num_tokens_in(self, request: Request) -> int:
        return len(request.block_table) * self.pool.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, self.pool.blocks_for(num_tokens) - len(request.block_table))

    def grow(self, request: Request, num_tokens: int) -> None:
        num_blocks = self.num_missing(request, num_tokens)
        if num_blocks:
            request.block_table += self.pool.allocate(num_blocks)

    def give_back(self, request: Request) -> None:
        """Every layer looks at all of them."""

    def release(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []

    def tables_of(self, request: Request) -> Iterable[list[int]]:
        return (request.block_table,)

    def check_invariants(self, request: Request) -> None:
        """``invariants.check_tokens`` has."""
