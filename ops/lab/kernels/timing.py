"""Measure how long a call takes: the median of many calls, each with cold caches.

On a GPU this is the device's time between two events, as ``triton.testing.do_bench`` measures it. Before each call a
gigabyte is overwritten. That evicts the inputs from the L2 cache (50 MB on Hopper), and keeps the device busy for a
quarter of a millisecond, in which the host launches the call. So a time does not include the host's part of a call,
which has its own column and which a captured graph does not pay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_FLUSHED_BYTES = 1 << 30
_MIN_CALLS, _MAX_CALLS = 5, 200


@dataclass(frozen=True)
class Times:
    """Times of a call.

    Args:
        us: time on the device; on a CPU of the whole call.
        host_us: time until the call returns to an idle host.
    """

    us: float
    host_us: float


def measure(call: Callable[[], Any], device: torch.device, budget_s: float) -> Times:
    """Time ``call`` for about ``budget_s``."""
    return _measure_gpu(call, device, budget_s) if device.type == "cuda" else _measure_cpu(call, budget_s)


def _measure_cpu(call: Callable[[], Any], budget_s: float) -> Times:
    call()
    times: list[float] = []
    while len(times) < _MIN_CALLS or (sum(times) < budget_s and len(times) < _MAX_CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    us = 1e6 * statistics.median(times)
    return Times(us, us)


def _measure_gpu(call: Callable[[], Any], device: torch.device, budget_s: float) -> Times:
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    for _ in range(3):  # compiles, tunes, and raises the clocks
        call()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    flushed.zero_()
    call()
    torch.cuda.synchronize(device)
    once_s = time.perf_counter() - started
    num_calls = max(_MIN_CALLS, min(_MAX_CALLS, int(budget_s / once_s)))
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls)]
    for start, end in zip(starts, ends, strict=True):
        flushed.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    device_us = statistics.median(1e3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
    return Times(device_us, _measure_host_us(call, device))


def _measure_host_us(call: Callable[[], Any], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(10):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize(device)
    return 1e6 * statistics.median(times)
