"""The free list of KV-cache blocks."""

from __future__ import annotations

from collections.abc import Iterable


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself; it must not go on."""


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1``; each is either free or in exactly one block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Used as a stack, so that the blocks freed last, still in the processor's cache, are taken first.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` blocks; their contents are undefined.

        Raises:
            InvariantError: so many are not free; the caller looks at ``num_free`` first.
        """
        if num_blocks > len(self._free):
            raise InvariantError(f"{num_blocks} blocks asked for, {len(self._free)} free")
        split = len(self._free) - num_blocks
        taken = self._free[split:]
        del self._free[split:]
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)

    def check_invariants(self, block_tables: Iterable[list[int]]) -> None:
        """Verify that free blocks and ``block_tables`` together hold every block once.

        Raises:
            InvariantError: a block is lost, held twice, or unknown.
        """
        blocks = list(self._free)
        for table in block_tables:
            blocks += table
        is_whole = len(blocks) == len(set(blocks)) == self.num_blocks
        if not is_whole or min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise InvariantError(
                f"{len(self._free)} free and {len(blocks) - len(self._free)} held blocks do not make up the pool of "
                f"{self.num_blocks}"
            )
