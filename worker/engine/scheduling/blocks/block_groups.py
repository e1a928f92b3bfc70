"""Groups of layers that allocate and free their blocks together: how many blocks a request has in each, and when.

A layer with a window attends only to the last tokens, so the blocks before the window can be reused. A block of the
pool, a *page*, belongs to one group: it has a place for the keys and values of each of that group's layers. All groups
have as many places, so any group can use any page (ops/decisions/kv_blocks.md).
"""

from __future__ import annotations

from dataclasses import dataclass


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
