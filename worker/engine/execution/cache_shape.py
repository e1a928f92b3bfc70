"""Size of a block of the KV cache, and number of blocks that requests need."""

from __future__ import annotations

from typing import Protocol

from ...config.engine_config import EngineConfig
from ...models.attention.page_layout import PageLayout
from ..scheduling.blocks.block_groups import BlockGroups


class CacheShape(Protocol):
    """Quantities that determine the size of the KV cache.

    Attributes:
        block_bytes: bytes of a block.
        num_spare: blocks that no request uses.
    """

    block_bytes: int
    num_spare: int

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request may hold at any time until it has ``num_tokens`` tokens."""
        ...

    def longest(self, num_blocks: int, limit: int) -> int:
        """Return the largest number of a request's tokens, up to ``limit``, for which ``num_blocks`` suffice."""
        ...

    def num_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Return how many tokens fit into ``num_blocks``."""
        ...


class WholeBlocks:
    """Implements ``CacheShape`` for blocks that hold their tokens for all layers."""

    num_spare = 0

    def __init__(self, bytes_per_token: int, block_size: int) -> None:
        self._block_size = block_size
        self.block_bytes = bytes_per_token * block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def longest(self, num_blocks: int, limit: int) -> int:
        return min(num_blocks * self._block_size, limit)

    def num_tokens(self, num_blocks: int, max_model_len: int) -> int:
        return num_blocks * self._block_size


class GroupedPages:
    """Implements ``CacheShape`` for blocks that are pages of one group of layers."""

    # The null block.
    num_spare = 1

    def __init__(self, layout: PageLayout, bytes_per_token: int, groups: BlockGroups) -> None:
        self._groups = groups
        self.block_bytes = layout.page_bytes(bytes_per_token, groups.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        return self._groups.max_blocks_for(num_tokens)

    def longest(self, num_blocks: int, limit: int) -> int:
        return self._groups.longest(num_blocks, limit)

    def num_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Return how many tokens fit for requests of maximum length. Shorter ones may take more blocks per token."""
        return num_blocks * max_model_len // self._groups.decode_blocks(max_model_len)


def groups_of(layout: PageLayout, config: EngineConfig) -> BlockGroups:
    """Return the properties of ``layout`` that the scheduler needs."""
    num_steps = 2 if config.async_scheduling else 1
    return BlockGroups(layout.windows, config.block_size, num_steps * config.token_budget)


def shape_of(layout: PageLayout | None, bytes_per_token: int, config: EngineConfig) -> CacheShape:
    """Return the shape of a cache with ``bytes_per_token`` bytes of a token in all layers together."""
    if layout is None:
        return WholeBlocks(bytes_per_token, config.block_size)
    return GroupedPages(layout, bytes_per_token, groups_of(layout, config))
