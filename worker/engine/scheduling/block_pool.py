"""Blocks of the KV cache: which are free, and how many a request needs in each group of layers.

A layer with a window attends only to the last tokens, so the blocks before the window can be reused. A block of the
pool, a *page*, belongs to one group: it has a place for the keys and values of each of that group's layers. All groups
have as many places, so any group can use any page (ops/decisions/kv_blocks.md).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True)
class BlockGroups:
    """Properties of the groups.

    Args:
        windows: how many tokens the layers of each group attend to, the token itself included; None for all earlier
            tokens. Groups without a window come first.
        block_size: tokens of a block.
        max_ahead: how many tokens of a request, after the computed ones, may have blocks at a time: the tokens of a
            step and of steps in flight.
    """

    windows: tuple[int | None, ...]
    block_size: int
    max_ahead: int

    def __len__(self) -> int:
        return len(self.windows)

    def first_needed(self, window: int | None, num_computed: int) -> int:
        """Return the index of the first block that token ``num_computed`` or a later one attends to."""
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def max_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request may hold at any time until it has ``num_tokens`` tokens."""
        return self._blocks(num_tokens, self.max_ahead)

    def decode_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of ``num_tokens`` tokens holds while it gets one token per step."""
        return self._blocks(num_tokens, 1)

    def _blocks(self, num_tokens: int, num_ahead: int) -> int:
        whole = -(-num_tokens // self.block_size)
        # A window and the tokens of a step may begin and end inside blocks.
        spans = (
            whole if window is None else (window - 1 + num_ahead + 2 * (self.block_size - 1)) // self.block_size
            for window in self.windows
        )
        return sum(min(whole, span) for span in spans)

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the largest number of tokens, up to ``limit``, for which ``num_blocks`` suffice."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.max_blocks_for(middle) <= num_blocks else (low, middle - 1)
        return low


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of the block of ``group`` with contents ``block_hash``. For the first group it is the hash."""
    return block_hash if group == 0 else block_hash + group.to_bytes(2, "big")


class GroupTables:
    """Block tables of one request.

    Attributes:
        tables: per group, blocks by their index in the request; the null block instead of freed blocks.
        firsts: per group, index of the first block that was not freed.
        version: changes with each change of the tables.
    """

    __slots__ = ("firsts", "tables", "version")

    def __init__(self, tables: list[list[int]], firsts: list[int]) -> None:
        self.tables = tables
        self.firsts = firsts
        self.version = 0
