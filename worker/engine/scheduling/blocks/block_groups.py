"""Groups of layers whose blocks are taken and given back together: how many blocks a request has in each, and when.

A layer with a window looks at the last tokens alone, so what lies behind them can hold something else. A block of the
pool, a *page*, is of one group: it has a place for the keys and values of each of its layers, as many places in every
group, and so serves any of them (decision 0097).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockGroups:
    """What is to be known of the groups.

    Args:
        windows: how many tokens the layers of each group see, the token itself included; None sees all before it.
            Groups of those come first.
        block_size: tokens of a block.
        max_ahead: of a request, how many tokens behind the computed ones are given blocks at once: what a step may
            compute, and what steps in flight do.
    """

    windows: tuple[int | None, ...]
    block_size: int
    max_ahead: int

    def __len__(self) -> int:
        return len(self.windows)

    def first_needed(self, window: int | None, num_computed: int) -> int:
        """The index of the first block at which tokens from ``num_computed`` on look, the nearest of them included."""
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """How many a request may hold at once on its way to ``num_tokens`` tokens."""
        return self._blocks(num_tokens, self.max_ahead)

    def decode_blocks(self, num_tokens: int) -> int:
        """How many a request of ``num_tokens`` tokens holds that gets one token after the other."""
        return self._blocks(num_tokens, 1)

    def _blocks(self, num_tokens: int, num_ahead: int) -> int:
        whole = -(-num_tokens // self.block_size)
        # A window and what is computed at once may begin and end within blocks.
        spans = (
            whole if window is None else (window - 1 + num_ahead + 2 * (self.block_size - 1)) // self.block_size
            for window in self.windows
        )
        return sum(min(whole, span) for span in spans)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The most tokens of a request, up to ``limit``, for which ``num_blocks`` suffice."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most_blocks(middle) <= num_blocks else (low, middle - 1)
        return low


def key_of(block_hash: bytes, group: int) -> bytes:
    """By which the block of ``group`` is found that holds what ``block_hash`` says. Of the first it is the hash."""
    return block_hash if group == 0 else block_hash + group.to_bytes(2, "big")


class GroupTables:
    """The blocks of one request.

    Attributes:
        tables: of each group, by the place of a block in the request; the null block in the place of those that were
            given back.
        firsts: of each group, where the others begin.
        version: another one after each change.
    """

    __slots__ = ("firsts", "tables", "version")

    def __init__(self, tables: list[list[int]], firsts: list[int]) -> None:
        self.tables = tables
        self.firsts = firsts
        self.version = 0
