"""The methods for ``collective_rpc`` that every engine has."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import torch

from ...config.engine_config import EngineConfig
from ..rpc import RpcEngine, RpcMethods, import_rpc_modules, rpc_method


def load_rpc_methods(config: EngineConfig) -> RpcMethods:
    """Return the methods of this module and of the operator's; raise ``ConfigurationError`` if one cannot be loaded."""
    return RpcMethods([sys.modules[__name__], *import_rpc_modules(config.rpc_modules)])


@rpc_method("device_info")
def device_info(engine: RpcEngine) -> dict[str, Any]:
    """Return the device, the dtype, the number of threads and the process of the engine."""
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
    """Return the bytes of the process, of accelerator memory and of the full KV cache, and the number of parameters."""
    device = engine.model.device
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "device_memory_bytes": torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
        "kv_cache_bytes": _kv_cache_bytes(engine),
        "num_parameters": engine.model.num_parameters,
    }


def _kv_cache_bytes(engine: RpcEngine) -> int:
    model = engine.model
    if engine.rank > 0:
        return sum(cache.nbytes for cache in model.forward.caches)
    pool, bytes_per_token = engine.core.scheduler.block_pool, model.forward.bytes_per_token
    if engine.pages is None:
        return pool.num_blocks * pool.block_size * bytes_per_token
    return pool.num_blocks * engine.pages.page_bytes(bytes_per_token, pool.block_size)


@rpc_method("check_invariants")
def check_invariants(engine: RpcEngine) -> bool:
    """Verify the engine's bookkeeping, which rank 0 holds; return True, or fail with the violation."""
    if engine.rank == 0:
        engine.core.check_invariants()
    return True
