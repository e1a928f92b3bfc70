"""The methods for ``collective_rpc`` that every engine has."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from ..rpc import RpcEngine, rpc_method


@rpc_method("device_info")
def device_info(engine: RpcEngine) -> dict[str, Any]:
    """What the engine computes on, and with."""
    device = engine.model.device
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_threads": torch.get_num_threads(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "pid": os.getpid(),
    }


@rpc_method("memory_summary")
def memory_summary(engine: RpcEngine) -> dict[str, int]:
    """Bytes: of the process, of an accelerator's memory, and what the KV cache takes when it is full."""
    pool, model = engine.core.scheduler.block_pool, engine.model
    bytes_per_token = model.forward.bytes_per_token
    block_bytes = pool.block_size * bytes_per_token
    if model.pages is not None:
        block_bytes = model.pages.page_bytes(bytes_per_token, pool.block_size)
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "device_memory_bytes": engine.core.device_memory_bytes,
        "kv_cache_bytes": pool.num_blocks * block_bytes,
        "num_parameters": model.num_parameters,
    }


@rpc_method("check_invariants")
def check_invariants(engine: RpcEngine) -> bool:
    """Verify the engine's bookkeeping; True, or the call fails with what is wrong."""
    engine.core.check_invariants()
    return True
