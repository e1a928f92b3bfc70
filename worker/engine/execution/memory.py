"""Measures the memory that is left for the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...config.engine_config import EngineConfig
from ...models.lean.captured import CapturedForward
from ...models.loaded import LoadedModel
from ...processes.host import free_host_bytes
from ..scheduling.chunking import MAX_PROMPT_ROWS


@dataclass(frozen=True)
class DeviceMemory:
    """Result of ``measure_memory``.

    Args:
        free_bytes: memory left after the weights and the two below.
        activation_bytes: memory of the largest forward, and of the vision encoder of a vision model; 0 on the CPU,
            where none is reserved for it.
        graph_bytes: memory of the pool of CUDA graphs, in addition to that of other forwards.
    """

    free_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0


def measure_memory(model: LoadedModel, config: EngineConfig) -> DeviceMemory:
    """Return the host's free memory, or run the largest forwards on a GPU. Deallocates the caches of ``model``."""
    if config.device == "cpu":
        return DeviceMemory(free_host_bytes())
    return _measure_gpu(model, config)


@torch.inference_mode()
def _measure_gpu(model: LoadedModel, config: EngineConfig) -> DeviceMemory:
    forward = model.forward
    if isinstance(forward, CapturedForward):
        # Drop the graphs that were captured to test the model when it was loaded.
        forward.allocate(0, config.block_size, 0, model.device)
    num_logit_rows = config.max_num_seqs + MAX_PROMPT_ROWS
    activation_bytes = _peak_bytes(partial(forward.profile, config.token_budget, num_logit_rows))
    if model.vision is not None:
        # Added, because the vision encoder may compute during a step with --async-scheduling.
        activation_bytes += _peak_bytes(model.vision.profile)
    graph_bytes = 0
    if isinstance(forward, CapturedForward):
        # Memory of the largest graph; smaller ones share it.
        graph_bytes = _peak_bytes(partial(forward.profile_graphs, config.max_num_seqs))
    free_bytes = torch.cuda.mem_get_info()[0] - activation_bytes - graph_bytes
    return DeviceMemory(free_bytes, activation_bytes, graph_bytes)


def _peak_bytes(run: Callable[[], None]) -> int:
    """Return the peak memory of ``run``, which is free again afterwards."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak_bytes
