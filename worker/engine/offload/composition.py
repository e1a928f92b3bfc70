"""Builds the KV offload, or refuses to."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import structlog

from ....shared.errors import ConfigurationError
from ....shared.process.command_line import format_bytes
from ...config.engine_config import EngineConfig
from ...host import free_host_bytes
from ...models.loaded import LoadedModel
from ..scheduling.blocks.block_pool import BlockPool
from .device_blocks import make_device_blocks
from .folder_tier import FolderTier
from .identity import identity_of
from .loading import Loader
from .memory_tier import MemoryTier
from .offload import KVOffload
from .records import HEADER_BYTES
from .tiers import Tiers
from .write_behind import WriteBehind

log = structlog.get_logger(__name__)


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


def make_offload(config: EngineConfig, folder: Path, model: LoadedModel, pool: BlockPool) -> KVOffload | None:
    """Start the offload that ``config`` requests; None if it requests none. The caches of ``model`` must be allocated.

    Raises:
        ConfigurationError: too little memory is free, or the limit is below a single block.
    """
    if not config.offloads_kv:
        return None
    writer_blocks, loader_blocks = (make_device_blocks(lambda: model.forward.caches, model.device) for _ in range(2))
    block_bytes = writer_blocks.block_bytes
    # The memory of a CPU's cache counts as free until it is filled, so it is subtracted.
    cache_bytes = pool.num_blocks * block_bytes if config.device == "cpu" else 0
    tiers = Tiers(_memory_tier(config, block_bytes, cache_bytes), _folder_tier(config, block_bytes))
    write_behind = WriteBehind(tiers, writer_blocks, pool)
    loader = Loader(tiers, loader_blocks)
    offload = KVOffload(tiers, write_behind, loader, partial(identity_of, config, folder, model))
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
