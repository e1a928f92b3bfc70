"""The KV-cache blocks: who holds each, what is in it, and which is taken next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself; it must not go on."""


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1``.

    A block is held by as many as have it in their block tables, or it is free. Full blocks may be given a hash of their
    contents, by which they are found again, held or free. Free blocks without one are taken first, then those with
    one, the least recently freed before the others; they lose their hash as they are taken.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._num_uses = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # Used as a stack, so that the blocks freed last, still in the processor's cache, are taken first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, whatever is in them."""
        return len(self._blank) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` free blocks, whose contents are forgotten.

        Raises:
            InvariantError: so many are not free; the caller looks at ``num_free`` first.
        """
        if num_blocks > self.num_free:
            raise InvariantError(f"{num_blocks} blocks asked for, {self.num_free} free")
        split = max(0, len(self._blank) - num_blocks)
        taken = self._blank[split:]
        del self._blank[split:]
        while len(taken) < num_blocks:
            block, _ = self._evictable.popitem(last=False)
            self._forget_hash(block)
            taken.append(block)
        for block in taken:
            self._ref_counts[block] = 1
            self._num_uses[block] += 1
        return taken

    def num_uses_of(self, block: int) -> int:
        """How often ``block`` was allocated: while that is the same, what fills it is. Any thread may ask."""
        return self._num_uses[block]

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of a block table. Its last blocks count as freed first: a beginning is of use to more requests."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._evictable[block] = None

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the first ``hashes``, up to the first that no block has."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds: holding them leaves so many fewer to allocate."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that ``find`` returned, together with whoever holds them already."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Note what a held block contains from now on. If another one contains the same, that one is still found."""
        if self._block_of_hash.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def hash_of(self, block: int) -> bytes | None:
        """The hash by which ``block`` is found; None without one."""
        return self._hashes[block]

    def forget_hashes(self) -> bool:
        """Forget what is in the blocks; False, and nothing is done, while somebody holds any."""
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
            InvariantError: a block is lost, held more or less often than counted, unknown, or found by a wrong hash.
        """
        holders = Counter(block for table in block_tables for block in table)
        if [holders.pop(block, 0) for block in range(self.num_blocks)] != self._ref_counts or holders:
            raise InvariantError("the ref counts are not those of the block tables")
        free = sorted([*self._blank, *self._evictable])
        if free != [block for block, count in enumerate(self._ref_counts) if count == 0]:
            raise InvariantError("the free blocks are not those that nobody holds")
        if any(self._hashes[block] is not None for block in self._blank):
            raise InvariantError("a block that counts as blank has a hash")
        if any(self._hashes[block] is None for block in self._evictable):
            raise InvariantError("a block that counts as evictable has no hash")
        hashes = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        if hashes != self._block_of_hash:
            raise InvariantError("the table of hashes does not find the blocks that have them")

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block] = None
