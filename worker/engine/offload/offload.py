"""KV offload of an engine as a whole: the blocks' identity, the tiers, and the threads that write and read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from ....shared.errors import ConfigurationError
from ....shared.stats import KVOffloadStats
from ....shared.values.shown import format_bytes
from ...config.engine_config import EngineConfig
from ...models.loaded import LoadedModel
from ...processes.host import free_host_bytes
from ..scheduling.block_pool import BlockPool
from .blocks import DeviceBlocks
from .folder_tier import HEADER_BYTES, FolderTier
from .tiers import MemoryTier, Tiers
from .transfers import Loader, WriteBehind

# Limit on the time to write pending blocks when the engine stops.
_CLOSE_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


class KVOffload:
    """Composition of the parts.

    Args:
        read_identity: reads all weights and returns the identity of their blocks; None if the weights are unloaded.
    """

    def __init__(
        self, tiers: Tiers, write_behind: WriteBehind, loader: Loader, read_identity: Callable[[], bytes | None]
    ) -> None:
        self._tiers = tiers
        self.write_behind = write_behind
        self.loader = loader
        self._read_identity = read_identity

    def renew_identity(self) -> None:
        """Read the identity again, since the weights may have changed: at the start, after a sleep, after a reset.

        No load or write may be in progress.
        """
        self.write_behind.stop()
        identity = self._read_identity()
        self._tiers.use(identity)
        log.info("kv_offload", identity=None if identity is None else identity.hex())

    def look_up(self, hashes: Sequence[bytes], block_size: int) -> int:
        """Return how many of the blocks ``hashes``, from the first on, can be read."""
        self._tiers.counters.num_queried_tokens += len(hashes) * block_size
        return self._tiers.find(hashes)

    def count_loaded(self, num_tokens: int) -> None:
        """Count tokens that were read instead of computed."""
        self._tiers.counters.num_hit_tokens += num_tokens

    def clear(self) -> None:
        """Forget the blocks of this identity, and read it again, since weights may have been changed in place."""
        self._tiers.clear()
        self.renew_identity()

    def stats(self) -> KVOffloadStats:
        """Return statistics; see ``KVOffloadStats``."""
        counters = self._tiers.counters
        return KVOffloadStats(
            num_queried_tokens=counters.num_queried_tokens,
            num_hit_tokens=counters.num_hit_tokens,
            num_read_bytes=counters.num_read_bytes,
            num_written_bytes=counters.num_written_bytes,
            num_dropped_blocks=counters.num_dropped_blocks,
            num_corrupt_blocks=counters.num_corrupt_blocks,
            memory_bytes=self._tiers.num_memory_bytes,
            dir_bytes=self._tiers.num_dir_bytes,
        )

    def close(self) -> None:
        """Write the pending blocks, within a time limit."""
        self.write_behind.finish(_CLOSE_TIMEOUT_S)


def check_model(config: EngineConfig, model: LoadedModel) -> None:
    """Raise ``ConfigurationError`` if KV blocks alone do not suffice to resume a request of ``model``."""
    if not config.offloads_kv:
        return
    if model.pooling is not None and model.pooling.is_encoder:
        why = "is an encoder, which has no KV cache"
    elif model.forward.keeps_state:
        why = "keeps states of requests, which are in no block"
    else:
        return
    raise ConfigurationError(f"{config.kv_offload_option} is not for {model.architecture}: it {why}; leave it out")


def make_offload(
    config: EngineConfig,
    pool: BlockPool,
    make_blocks: Callable[[], DeviceBlocks],
    read_identity: Callable[[], bytes | None],
) -> KVOffload | None:
    """Start the offload that ``config`` requests; None if it requests none. The caches must be allocated.

    Args:
        make_blocks, read_identity: ``device_blocks`` and ``block_identity`` of the engine's ranks.

    Raises:
        ConfigurationError: too little memory is free, or the limit is below a single block.
    """
    if not config.offloads_kv:
        return None
    writer_blocks, loader_blocks = make_blocks(), make_blocks()
    block_bytes = writer_blocks.block_bytes
    # The memory of a CPU's cache counts as free until it is filled, so it is subtracted.
    cache_bytes = pool.num_blocks * block_bytes if config.device == "cpu" else 0
    tiers = Tiers(_memory_tier(config, block_bytes, cache_bytes), _folder_tier(config, block_bytes))
    write_behind = WriteBehind(tiers, writer_blocks, pool)
    loader = Loader(tiers, loader_blocks)
    offload = KVOffload(tiers, write_behind, loader, read_identity)
    offload.renew_identity()
    return offload


def _memory_tier(config: EngineConfig, block_bytes: int, cache_bytes: int) -> MemoryTier | None:
    num_bytes = config.kv_offload_memory
    if num_bytes is None:
        return None
    free_bytes = max(0, free_host_bytes() - cache_bytes)
    if num_bytes > free_bytes:
        raise ConfigurationError(
            f"kv_offload_memory lets KV blocks take {format_bytes(num_bytes)} of the host's memory, but "
            f"{format_bytes(free_bytes)} is free: lower it"
        )
    _check_fits_block("kv_offload_memory", num_bytes, block_bytes)
    if config.device == "cpu":
        log.info("kv_offload_memory_beside_cache", instead="kv_cache_memory")
    return MemoryTier(num_bytes, block_bytes)


def _folder_tier(config: EngineConfig, block_bytes: int) -> FolderTier | None:
    if not config.kv_offload_dir:
        return None
    _check_fits_block("kv_offload_dir_size", config.kv_offload_dir_size, block_bytes + HEADER_BYTES)
    return FolderTier(Path(config.kv_offload_dir), config.kv_offload_dir_size, block_bytes)


def _check_fits_block(option: str, num_bytes: int, needed: int) -> None:
    if num_bytes < needed:
        raise ConfigurationError(
            f"{option} is {format_bytes(num_bytes)}, and one block takes {needed:,} bytes: raise it"
        )
