"""Size of the KV cache, of its blocks, and number of blocks that requests need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ....shared.errors import CacheTooSmallError, DeviceMemoryError
from ....shared.values.shown import format_bytes
from ...config.batch import DEFAULT_MEMORY_UTILIZATION
from ...config.engine_config import EngineConfig
from ...models.attention.page_layout import PageLayout
from ..scheduling.block_pool import BlockGroups


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
    num_steps = 2 if config.looks_ahead else 1
    return BlockGroups(layout.windows, config.block_size, num_steps * config.token_budget)


def shape_of(layout: PageLayout | None, bytes_per_token: int, config: EngineConfig) -> CacheShape:
    """Return the shape of a cache with ``bytes_per_token`` bytes of a token in all layers together."""
    if layout is None:
        return WholeBlocks(bytes_per_token, config.block_size)
    return GroupedPages(layout, bytes_per_token, groups_of(layout, config))


_MIB = 1 << 20


@dataclass(frozen=True)
class KVCacheSize:
    """The number of blocks of the KV cache, and how they are used.

    Args:
        block_bytes: bytes of a block.
        max_model_len: most tokens of a request, as requested, or as the model allows and the blocks suffice.
        state_bytes: bytes of the state pool.
        num_tokens: number of tokens that fit.
        pages: how layers share the blocks if some of them attend within a window; None for one block table.
    """

    num_blocks: int
    block_bytes: int
    max_model_len: int
    state_bytes: int
    num_tokens: int
    pages: PageLayout | None = None

    def limited(self, num_blocks: int) -> KVCacheSize:
        """Return the size of a cache with at most ``num_blocks``, for requests of the same lengths."""
        return replace(self, num_blocks=min(self.num_blocks, num_blocks))

    def describe(self, block_size: int) -> dict[str, int]:
        """Return values for the log."""
        return {
            "kv_cache_mib": self.num_blocks * self.block_bytes // _MIB,
            "state_pool_mib": self.state_bytes // _MIB,
            "num_blocks": self.num_blocks,
            "block_size": block_size,
            "kv_cache_tokens": self.num_tokens,
            "max_model_len": self.max_model_len,
        }


def size_kv_cache(
    config: EngineConfig,
    *,
    bytes_per_token: int,
    bytes_per_request: int = 0,
    free_bytes: int,
    max_model_len: int,
    is_length_chosen: bool,
    pages: PageLayout | None = None,
) -> KVCacheSize:
    """Decide how many blocks the KV cache gets.

    The cache gets ``kv_cache_memory`` if that is set, else this engine's share of ``free_bytes``, minus the states of
    ``max_num_seqs`` requests. It gets no more than ``max_num_seqs`` requests of ``max_model_len`` can use. A length
    limit that comes from the model is lowered to the length that fits.

    Args:
        bytes_per_token: cache bytes of one token in all layers; 0 for a model without attention.
        bytes_per_request: state in addition to keys and values.
        free_bytes: memory that is free on the device now.
        is_length_chosen: whether the user set ``max_model_len``, so that it must not be lowered.
        pages: how groups of layers share the cache if some have attention windows; None if none has.

    Raises:
        CacheTooSmallError: not a single request fits; the message says which option to change.
        DeviceMemoryError: the memory is not free.
    """
    shape = shape_of(pages, bytes_per_token, config)
    block_bytes = shape.block_bytes
    if config.kv_cache_memory is not None:
        share, source = config.kv_cache_memory, "kv_cache_memory"
    else:
        utilization = config.gpu_memory_utilization or DEFAULT_MEMORY_UTILIZATION[config.device]
        num_sharers = config.num_engines_on_host * config.num_ranks_on_host if config.device == "cpu" else 1
        share, source = int(free_bytes * utilization) // num_sharers, "gpu_memory_utilization"
    state_bytes = _state_bytes(config, bytes_per_request, share, source)
    share -= state_bytes
    blocks_per_request = shape.blocks_for(max_model_len)
    num_blocks = config.max_num_seqs * blocks_per_request
    if block_bytes:
        num_blocks = min(num_blocks, share // block_bytes - shape.num_spare)
    if num_blocks < 1:
        raise CacheTooSmallError(
            f"the KV cache may take {format_bytes(share)} ({source}), but a block of {config.block_size} tokens needs "
            f"{format_bytes(block_bytes)}: raise {source} or lower block_size"
        )
    longest = shape.longest(num_blocks, max_model_len)
    if longest < max_model_len and (is_length_chosen or longest < 2):
        needed = format_bytes(blocks_per_request * block_bytes)
        shorter = f"lower max_model_len to {longest} or " if longest >= 2 else ""
        raise CacheTooSmallError(
            f"the KV cache may take {format_bytes(share)} ({source}), but one request of max_model_len {max_model_len} "
            f"needs {needed}: {shorter}raise {source}"
        )
    max_model_len = min(max_model_len, longest)
    if config.kv_cache_memory is not None and not config.defers_cache:
        _check_is_free((num_blocks + shape.num_spare) * block_bytes + state_bytes, free_bytes)
    num_tokens = shape.num_tokens(num_blocks, max_model_len)
    return KVCacheSize(num_blocks, block_bytes, max_model_len, state_bytes, num_tokens, pages)


def check_room(free_bytes: int, step_bytes: int) -> None:
    """Verify that a process beside the one that serves leaves it enough memory of a GPU.

    Args:
        free_bytes: memory that is free after the weights and the largest step of the waiting process.
        step_bytes: memory of the largest step.

    Raises:
        DeviceMemoryError: the largest step of the process that serves does not fit.
    """
    if free_bytes < step_bytes:
        raise DeviceMemoryError(
            f"beside the standby {format_bytes(max(0, free_bytes))} of the device are free, and the largest step of "
            f"the engine that serves takes {format_bytes(step_bytes)}: lower kv_cache_memory by the difference, or "
            "leave standby out"
        )


def _check_is_free(needed: int, free_bytes: int) -> None:
    if needed > free_bytes:
        raise DeviceMemoryError(
            f"kv_cache_memory lets the KV cache take {format_bytes(needed)}, but {format_bytes(free_bytes)} is free: "
            "lower kv_cache_memory or max_num_seqs"
        )


def _state_bytes(config: EngineConfig, bytes_per_request: int, share: int, source: str) -> int:
    """Return the bytes of the state pool, which must be less than ``share``."""
    state_bytes = bytes_per_request * config.max_num_seqs
    if state_bytes and state_bytes >= share:
        raise CacheTooSmallError(
            f"the KV cache may take {format_bytes(share)} ({source}), but the states of {config.max_num_seqs} requests "
            f"need {format_bytes(state_bytes)} of it: lower max_num_seqs or raise {source}"
        )
    return state_bytes
