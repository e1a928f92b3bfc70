"""Chooses the page layout of the KV cache: groups of layers, or one table for all layers.

The reasons are in ops/decisions/kv_blocks.md.
"""

from __future__ import annotations

import structlog
import torch

from ....shared.errors import ConfigurationError
from ...config.engine_config import EngineConfig
from ...models.attention.page_layout import PageLayout
from ...models.attention.pages import PagedByGroups, plan_pages, shapes_differ
from ...models.loaded import LoadedModel
from ..execution.kv_cache import KVCacheSize, groups_of
from ..ranks.interface import Ranks
from ..ranks.sharded_forward import ShardedForward
from ..scheduling.block_pool import BlockPool
from ..scheduling.block_tables import BlockTables, GroupedTables, SingleBlockTable
from ..scheduling.prefix_cache import BlockHashCache, GroupHashCache

log = structlog.get_logger(__name__)


def size_caches(config: EngineConfig, model: LoadedModel, ranks: Ranks) -> KVCacheSize:
    """Choose the layout of pages and the size of the cache.

    Raises: as for ``Ranks.size_cache``.
    """
    pages = choose_pages(config, model)
    if pages is not None:
        try:
            return ranks.size_cache(pages)
        except ConfigurationError as error:
            # Groups are padded to whole pages, so a cache for one request may be large enough only with one table.
            log.info("no_window_groups", architecture=model.architecture, reason=str(error))
    return ranks.size_cache()


def choose_pages(config: EngineConfig, model: LoadedModel) -> PageLayout | None:
    """Return the layout of pages; None if every layer stores whole requests.

    Call it after the model is loaded and before the cache is sized.
    """
    calls = model.forward.attention_calls
    if not calls:
        return None
    layout = plan_pages(calls, model.max_model_len, config.block_size)
    if layout is None:
        return None
    obstacle = _obstacle(config, model)
    if obstacle is not None:
        log.info("no_window_groups", architecture=model.architecture, reason=obstacle)
        return None
    windows = [0 if window is None else window for window in layout.windows]
    log.info("window_groups", windows=windows, layers_per_group=layout.num_places, num_layers=len(calls))
    return layout


def _obstacle(config: EngineConfig, model: LoadedModel) -> str | None:
    """Return why all layers have to share one block table; None if they need not."""
    if config.offloads_kv:
        return "offloaded blocks contain all layers"
    if config.pipeline_parallel_size > 1:
        return "the stages of a pipeline have layers of different kinds"
    forward = model.forward.local if isinstance(model.forward, ShardedForward) else model.forward
    if forward.keeps_state or not isinstance(forward, PagedByGroups):
        return f"the mode {model.forward.mode!r} has one block table"
    if shapes_differ(model.forward.attention_calls):
        return "a token takes more memory in some layers than in others"
    return None


def allocate_caches(config: EngineConfig, model: LoadedModel, size: KVCacheSize, device: torch.device) -> None:
    """Allocate the caches and their buffers.

    Args:
        device: the model's device when it is awake; a sleeping model has none.
    """
    forward, sizes = model.forward, (config.block_size, config.max_num_seqs, device)
    if size.pages is None:
        forward.allocate(size.num_blocks, *sizes)
    else:
        assert isinstance(forward, PagedByGroups)
        forward.allocate_pages(size.pages, size.num_blocks + 1, *sizes)  # plus one for the null block


def make_tables(config: EngineConfig, pages: PageLayout | None, pool: BlockPool) -> BlockTables:
    """Return the block tables that assign blocks of ``pool`` to requests."""
    return SingleBlockTable(pool) if pages is None else GroupedTables(pool, groups_of(pages, config))


def make_hash_cache(config: EngineConfig, pages: PageLayout | None, pool: BlockPool) -> BlockHashCache:
    """Return the prefix cache over the blocks of ``pool``."""
    return BlockHashCache(pool) if pages is None else GroupHashCache(pool, groups_of(pages, config))
