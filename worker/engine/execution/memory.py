"""What memory there is for the KV cache, once all else has had its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ...config.engine_config import EngineConfig
from ...host import free_host_bytes
from ...models.lean.captured import CapturedForward
from ...models.loaded import LoadedModel
from ..scheduling.prompt_budget import MAX_PROMPT_ROWS


@dataclass(frozen=True)
class DeviceMemory:
    """The outcome of ``measure_memory``.

    Args:
        free_bytes: what is left beside the weights and the two below.
        activation_bytes: of the largest forward, and of the tower of a model that sees; on the CPU nothing is set
            aside for it.
        graph_bytes: of the pool in which CUDA graphs compute, beside those of other forwards.
    """

    free_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0


def measure_memory(model: LoadedModel, config: EngineConfig) -> DeviceMemory:
    """Ask the host, or try the largest forwards out on a GPU. The caches of ``model`` are gone afterwards."""
    if config.device == "cpu":
        return DeviceMemory(free_host_bytes())
    return _measure_gpu(model, config)


@torch.inference_mode()
def _measure_gpu(model: LoadedModel, config: EngineConfig) -> DeviceMemory:
    forward = model.forward
    if isinstance(forward, CapturedForward):
        # The graphs with which the model was tried out when it was loaded.
        forward.allocate(0, config.block_size, 0, model.device)
    num_logit_rows = config.max_num_seqs + MAX_PROMPT_ROWS
    activation_bytes = _peak_bytes(partial(forward.profile, config.token_budget, num_logit_rows))
    if model.vision is not None:
        # It computes between two steps, or with --async-scheduling during one.
        activation_bytes += _peak_bytes(model.vision.profile)
    graph_bytes = 0
    if isinstance(forward, CapturedForward):
        # The largest graph's; smaller ones compute in the same memory.
        graph_bytes = _peak_bytes(partial(forward.profile_graphs, config.max_num_seqs))
    free_bytes = torch.cuda.mem_get_info()[0] - activation_bytes - graph_bytes
    return DeviceMemory(free_bytes, activation_bytes, graph_bytes)


def _peak_bytes(run: Callable[[], None]) -> int:
    """The most memory that ``run`` takes at once, which is free again afterwards."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    return peak_bytes
