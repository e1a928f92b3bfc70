"""Measures the memory of each rank, sizes the KV cache that fits on all of them, and captures their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import structlog

from ...config.engine_config import EngineConfig
from ...models.attention.page_layout import PageLayout
from ...models.lean.captured import CapturedForward, CapturesLater
from ...models.loaded import LoadedModel
from ...models.weights.movable import ModelWeights
from ..execution.kv_cache import KVCacheSize, check_room, size_kv_cache
from ..execution.memory import measure_memory
from .messages import RankMemory

_MIB = 1 << 20

log = structlog.get_logger(__name__)


def measure_rank(model: LoadedModel, config: EngineConfig) -> RankMemory:
    """Run this rank's part of ``model`` to measure its memory, and free its caches. All ranks call it together."""
    memory = measure_memory(model, config)
    return RankMemory(
        free_bytes=memory.free_bytes,
        activation_bytes=memory.activation_bytes,
        graph_bytes=memory.graph_bytes,
        bytes_per_token=model.forward.bytes_per_token,
        bytes_per_request=model.forward.bytes_per_request,
        # Never reloaded here, only counted.
        weight_bytes=ModelWeights(model.weights, lambda: model.weights).num_bytes,
    )


def size_for_all(
    config: EngineConfig, model: LoadedModel, memories: Sequence[RankMemory], pages: PageLayout | None = None
) -> KVCacheSize:
    """Return the cache size of the rank with the least memory, because all ranks have the same blocks.

    Raises:
        ConfigurationError: not a single request fits; the message names the option to change.
    """
    for memory in memories if config.defers_cache and config.device == "cuda" else ():
        check_room(memory.free_bytes, memory.activation_bytes + memory.graph_bytes)
    sizes = [
        size_kv_cache(
            config,
            bytes_per_token=memory.bytes_per_token,
            bytes_per_request=memory.bytes_per_request,
            free_bytes=memory.free_bytes,
            max_model_len=model.max_model_len,
            is_length_chosen=model.is_length_chosen,
            pages=pages,
        )
        for memory in memories
    ]
    size = min(sizes, key=lambda size: size.num_blocks)
    smallest = memories[sizes.index(size)]
    log.info("kv_cache", **size.describe(config.block_size), **_described(smallest))
    return size


def _described(memory: RankMemory) -> dict[str, int]:
    """Return values for the log."""
    if memory.activation_bytes == 0:
        return {}
    return {"activations_mib": memory.activation_bytes // _MIB, "cuda_graphs_mib": memory.graph_bytes // _MIB}


def capture_again(model: LoadedModel) -> None:
    """Capture the graphs of this rank's forward again if its weights or caches have moved."""
    if isinstance(model.forward, CapturedForward):
        model.forward.capture()


def capture_next(model: LoadedModel, compiling: Callable[[], AbstractContextManager[None]]) -> bool:
    """Capture a missing graph on all ranks, if any is missing; return whether one still is. Rank 0 calls it.

    Args:
        compiling: marks the time that it takes.
    """
    forward = model.forward
    # A forward of ranks that share experts needs the others.
    if not isinstance(forward, CapturesLater) or model.expert_ranks is not None:
        return False
    if forward.num_uncaptured:
        with compiling():
            forward.capture_next()
    return forward.num_uncaptured > 0
