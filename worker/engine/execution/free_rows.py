"""Measures how many tokens a forward computes in little more time than one, for draft tokens.

The reasons are in ops/decisions/speculation.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import structlog
import torch

from ..scheduling.drafting import STEP_COST
from .model_runner import ModelRunner

# Numbers of tokens to try. On a CPU products process 6 rows at a time, or 16 with matrix tiles.
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
# Other load on the machine makes a forward longer, never shorter. So the shortest of this many trials counts, and a
# size is rejected only if none of them was short enough.
_NUM_TRIALS = 6

log = structlog.get_logger(__name__)


@torch.inference_mode()
def measure_free_rows(runner: ModelRunner, limit: int, *, tries_all: bool = False) -> int:
    """Return how many tokens a step may have and take hardly longer than a step of one token: 1 to ``limit``.

    The caches must be allocated, and stay unchanged.

    Args:
        tries_all: run the same forwards whatever their times are, as ranks must whose forwards are collectives.
    """
    shortest_s = min(_times_s(runner, 1))
    sizes = [size for size in _SIZES if size <= limit]
    trials: Iterable[Iterable[float]] = (_times_s(runner, size) for size in sizes)
    if tries_all:
        trials = [list(times_s) for times_s in trials]
    num_free_rows = 1
    for size, times_s in zip(sizes, trials, strict=True):
        if not any(time_s <= (1 + STEP_COST) * shortest_s for time_s in times_s):
            break
        num_free_rows = size
    log.info("free_rows", num_free_rows=num_free_rows, time_of_one_ms=round(shortest_s * 1e3, 3))
    return num_free_rows


def _times_s(runner: ModelRunner, num_tokens: int) -> Iterator[float]:
    """Yield the time of a forward of ``num_tokens`` tokens, once per trial."""
    runner.compute_unstored(num_tokens)  # a warm-up, because some buffers are allocated on first use
    for _ in range(_NUM_TRIALS):
        started_s = time.perf_counter()
        runner.compute_unstored(num_tokens)
        yield time.perf_counter() - started_s
