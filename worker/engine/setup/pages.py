"""Whether the layers of a model share the KV cache by groups, or why they do not (decision 0097)."""

from __future__ import annotations

import structlog
import torch

from ....shared.errors import ConfigurationError
from ...config.engine_config import EngineConfig
from ...models.attention.page_layout import PageLayout
from ...models.attention.pages import PagedByGroups, plan_pages, shapes_differ
from ...models.loaded import LoadedModel
from ..execution.cache_shape import groups_of
from ..execution.kv_cache import KVCacheSize
from ..ranks.interface import Ranks
from ..ranks.sharded_forward import ShardedForward
from ..scheduling.blocks.block_pool import BlockPool
from ..scheduling.blocks.block_tables import BlockTables, OneTable
from ..scheduling.blocks.group_prefix_cache import GroupHashCache
from ..scheduling.blocks.group_tables import GroupedTables
from ..scheduling.blocks.prefix_cache import BlockHashCache

log = structlog.get_logger(__name__)


def size_caches(config: EngineConfig, model: LoadedModel, ranks: Ranks) -> KVCacheSize:
    """Choose ``model.pages``, and the size of the cache that follows.

    Raises: as ``Ranks.size_cache``.
    """
    model.pages = choose_pages(config, model)
    if model.pages is not None:
        try:
            return ranks.size_cache(model.pages)
        except ConfigurationError as error:
            # Groups are filled up to whole pages, so a cache for hardly one request may hold it in one table alone.
            log.info("no_window_groups", architecture=model.architecture, reason=str(error))
            model.pages = None
    return ranks.size_cache()


def choose_pages(config: EngineConfig, model: LoadedModel) -> PageLayout | None:
    """How pages are laid out; None where every layer keeps requests whole. The model is loaded, its cache not sized."""
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
    """Why the layers have to share a table; None if they need not."""
    if config.offloads_kv:
        return "blocks that are kept beside the cache hold all layers"
    if config.pipeline_parallel_size > 1:
        return "the stages of a pipeline have layers of different kinds"
    forward = model.forward.local if isinstance(model.forward, ShardedForward) else model.forward
    if forward.keeps_state or not isinstance(forward, PagedByGroups):
        return f"the mode {model.forward.mode!r} has one block table"
    if shapes_differ(model.forward.attention_calls):
        return "a token takes more room in some layers than in others"
    return None


def allocate_caches(config: EngineConfig, model: LoadedModel, num_blocks: int, device: torch.device) -> None:
    """Make the caches of ``num_blocks`` blocks, and what belongs to them.

    Args:
        device: of the model when it is awake; while its weights sleep it has none.
    """
    forward, sizes = model.forward, (config.block_size, config.max_num_seqs, device)
    if model.pages is None:
        forward.allocate(num_blocks, *sizes)
    else:
        assert isinstance(forward, PagedByGroups)
        forward.allocate_pages(model.pages, num_blocks + 1, *sizes)  # the last is the null block


def make_tables(config: EngineConfig, model: LoadedModel, pool: BlockPool) -> BlockTables:
    """What gives requests blocks of ``pool``."""
    return OneTable(pool) if model.pages is None else GroupedTables(pool, groups_of(model.pages, config))


def make_hash_cache(config: EngineConfig, model: LoadedModel, pool: BlockPool) -> BlockHashCache:
    """What finds them again."""
    return BlockHashCache(pool) if model.pages is None else GroupHashCache(pool, groups_of(model.pages, config))
