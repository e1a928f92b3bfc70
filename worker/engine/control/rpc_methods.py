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
    """Our methods and those of the operator's modules. Raises ``ConfigurationError`` if one cannot be had."""
    return RpcMethods([sys.modules[__name__], *import_rpc_modules(config.rpc_modules)])


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
    if model.pages is None:
        return pool.num_blocks * pool.block_size * bytes_per_token
    return pool.num_blocks * model.pages.page_bytes(bytes_per_token, pool.block_size)


@rpc_method("check_invariants")
def check_invariants(engine: RpcEngine) -> bool:
    """Verify the engine's bookkeeping, which is that of rank 0; True, or the call fails with what is wrong."""
    if engine.rank == 0:
        engine.core.check_invariants()
    return True
