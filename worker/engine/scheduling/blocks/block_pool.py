"""KV-cache blocks: how many requests hold each, its contents, and which block is allocated next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself; the engine must stop."""


class BlockPool:
    """Allocates block ids ``0 .. num_blocks - 1``.

    A block is held by each request that has it in its block table, or it is free. A full block may get a hash of its
    contents, by which it is found again, held or free. Free blocks without a hash are allocated first, then blocks with
    a hash, the least recently freed first; an allocated block loses its hash.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._num_uses = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # A stack, so that the blocks freed last, which are still in the processor's cache, are allocated first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds, with or without contents."""
        return len(self._blank) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate ``num_blocks`` free blocks, and forget their contents.

        Raises:
            InvariantError: fewer are free; the caller checks ``num_free`` first.
        """
        if num_blocks > self.num_free:
            raise InvariantError(f"{num_blocks} blocks requested, {self.num_free} free")
        split = max(0, len(self._blank) - num_blocks)
        blocks = self._blank[split:]
        del self._blank[split:]
        while len(blocks) < num_blocks:
            block, _ = self._evictable.popitem(last=False)
            self._forget_hash(block)
            blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = 1
            self._num_uses[block] += 1
        return blocks

    def num_uses_of(self, block: int) -> int:
        """Return how often ``block`` was allocated. Its contents are the same while this is. Callable in any thread."""
        return self._num_uses[block]

    def free(self, blocks: Sequence[int]) -> None:
        """Free a block table. Its last blocks count as freed first, because more requests share a beginning."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._evictable[block] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first ``hashes``, up to the first hash without a block."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` are free: ``hold`` would lower ``num_free`` by this number."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that ``find`` returned, in addition to their other holders."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Set the hash of a held block's contents. If another block has this hash already, ``find`` returns that."""
        if self._block_of_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash by which ``block`` is found; None if it has none."""
        return self._hashes[block]

    def forget_hashes(self) -> bool:
        """Forget the contents of all blocks; return False and do nothing while any block is held."""
        if self.num_free < self.num_blocks:
            return False
        for block in list(self._evictable):
            self._forget_hash(block)
        self._blank.extend(self._evictable)
        self._evictable.clear()
        return True

    def check_invariants(self, block_tables: Iterable[list[int]]) -> None:
        """Verify ref counts, free blocks and hashes against ``block_tables``.

        Raises:
            InvariantError: a block is lost, has a wrong ref count, is unknown, or is found by a wrong hash.
        """
        holders = Counter(block for table in block_tables for block in table)
        if [holders.pop(block, 0) for block in range(self.num_blocks)] != self._ref_counts or holders:
            raise InvariantError("the ref counts differ from the block tables")
        free = sorted([*self._blank, *self._evictable])
        if free != [block for block, count in enumerate(self._ref_counts) if count == 0]:
            raise InvariantError("the free blocks are not exactly the blocks without a holder")
        if any(self._hashes[block] is not None for block in self._blank):
            raise InvariantError("a blank block has a hash")
        if any(self._hashes[block] is None for block in self._evictable):
            raise InvariantError("an evictable block has no hash")
        hashes = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        if hashes != self._block_of_hash:
            raise InvariantError("the table of hashes does not match the blocks' hashes")

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None
