"""Memory of a device that several models share: how much is free, and how much each model may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from ...shared.values.shown import format_bytes
from ..processes.gpu import free_device_bytes
from ..processes.host import free_host_bytes

GIB = 1 << 30
# Shares of the free memory that models may take together by default.
_GPU_SHARE, _CPU_SHARE = 0.9, 0.4
# Bytes of a process without weights and KV cache. More are reserved if it was measured to take more.
PROCESS_BYTES = {"cpu": 128 << 20, "cuda": GIB}
_PROCESS_STEP = 32 << 20
# A cache leaves at most these parts to sleeping processes, a quarter of the budget and half of what is left for both.
_SLEEPERS_OF_BUDGET, _SLEEPERS_OF_REST = 4, 2


class ModelBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a model on a device.

    Args:
        weights: estimated by its files until it was loaded.
        cache: its KV cache, if options set it; None to derive it from the budget.
        process: bytes reserved for its process without both.
        least_cache: bytes of the cache for one request of maximum length; 0 until it was loaded.
    """

    weights: int
    process: int
    cache: int | None = None
    is_pinned: bool = False
    least_cache: int = 0


def cache_bytes(budget: int, model: ModelBytes, everyone: Sequence[ModelBytes]) -> int:
    """Return the bytes for the KV cache of a model, such that it fits beside the pinned models; 0 if it never does.

    Sleeping processes get a part of the rest. Those that do not fit end when the model wakes. The cache of a model that
    was loaded is not smaller than one request of maximum length, as far as that fits without any sleeping process.
    Pinned models, and the largest other one, get equal parts of the rest after weights and processes.

    Args:
        everyone: all models of the device, this one among them.
    """
    if model.cache is not None:
        return model.cache
    pinned = [each for each in everyone if each.is_pinned]
    movable = [each for each in everyone if not each.is_pinned]
    if not model.is_pinned:
        beside = sum(_awake_bytes(each, cache_bytes(budget, each, everyone)) for each in pinned)
        sleepers, num_parts = [each.process for each in movable if each is not model], 1
        used = beside + _awake_bytes(model, 0)
    else:
        largest = max(movable, key=_fixed_bytes, default=None)
        sleepers = [each.process for each in movable if each is not largest]
        num_parts = sum(each.cache is None for each in pinned) + any(each.cache is None for each in movable)
        used = sum(map(_fixed_bytes, pinned)) + (_fixed_bytes(largest) if largest is not None else 0)
    rest = max(0, budget - used)
    reserved = min(sum(sleepers), budget // _SLEEPERS_OF_BUDGET, rest // _SLEEPERS_OF_REST)
    return max((rest - reserved) // num_parts, min(rest // num_parts, model.least_cache))


def size_problem(budget: int, name: str, model: ModelBytes, everyone: Sequence[ModelBytes]) -> str:
    """Return the sentence that a model does not fit, even while all models that may leave are gone; empty if it fits.

    Arguments are those of ``cache_bytes``.
    """
    cache = cache_bytes(budget, model, everyone)
    pinned = [each for each in everyone if each.is_pinned and each is not model]
    beside = sum(_awake_bytes(each, cache_bytes(budget, each, everyone)) for each in pinned)
    if cache > 0 and beside + _awake_bytes(model, cache) <= budget:
        return ""
    return (
        f"{name} does not fit{f' beside pinned models of {format_bytes(beside)}' if pinned else ''}: its weights have "
        f"{format_bytes(model.weights)}, its KV cache {format_bytes(model.cache or 0)}, its process "
        f"{format_bytes(model.process)}, device_memory is {format_bytes(budget)}; raise device_memory, or give the "
        "model a smaller kv_cache_memory"
    )


def _awake_bytes(model: ModelBytes, cache: int) -> int:
    return model.weights + model.process + cache


def _fixed_bytes(model: ModelBytes) -> int:
    """Return the bytes of an awake model without a cache that is derived from the budget."""
    return _awake_bytes(model, model.cache or 0)


def files_state(model: Path) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and times of a model's files, which change when somebody repairs it; empty if it is gone."""
    try:
        paths = sorted(model.iterdir()) if model.is_dir() else [model]
        states = [(path.name, path.stat()) for path in paths]
    except OSError:
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def default_budget(visible_devices: str | None) -> int:
    """Return the bytes that all models of a device may take together."""
    if visible_devices is None:
        return int(_CPU_SHARE * free_host_bytes())
    return int(_GPU_SHARE * free_device_bytes(visible_devices))


def default_host_budget(visible_devices: str | None, num_devices: int) -> int:
    """Return the bytes of the host for weights of models that sleep at level 1, of one device.

    None on the CPU, since weights there are in the memory of the device.
    """
    return 0 if visible_devices is None else free_host_bytes() // 2 // num_devices


def reserved_bytes(reserved: int, measured: int) -> int:
    """Return the bytes to reserve for a process: in steps and never less, so that caches seldom change their size."""
    return max(reserved, -(-measured // _PROCESS_STEP) * _PROCESS_STEP)


def own_bytes(pids: Sequence[int]) -> int:
    """Return the bytes of host memory that only these processes use; those that have ended count for nothing."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except psutil.Error:
            continue
    return total
