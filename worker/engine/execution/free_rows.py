"""How many tokens a forward computes in little more time than one: what is there for guesses (decision 0083)."""

from __future__ import annotations

import time

import structlog
import torch

from .model_runner import ModelRunner

# Tokens of a forward that are tried. On a CPU products work on 6 rows at a time, or on 16 with matrix tiles.
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
# A forward with guesses gives at least the token that one without gives. So much longer it may take.
_MOST_COST = 1.25
# The least of so many counts: what else runs on the machine makes a forward longer, and never shorter.
_NUM_TRIALS = 3

log = structlog.get_logger(__name__)


@torch.inference_mode()
def measure_free_rows(runner: ModelRunner, most: int) -> int:
    """Return how many tokens a step may have and still take hardly longer than one of a single token: 1 to ``most``.

    Caches have to be allocated, and stay as they are.
    """
    least_s = _least_time_s(runner, 1)
    found = 1
    for size in _SIZES:
        if size > most or _least_time_s(runner, size) > _MOST_COST * least_s:
            break
        found = size
    log.info("free_rows", num_free_rows=found, time_of_one_ms=round(least_s * 1e3, 3))
    return found


def _least_time_s(runner: ModelRunner, num_tokens: int) -> float:
    runner.compute_unstored(num_tokens)  # what is made when it is needed, is made
    times_s: list[float] = []
    for _ in range(_NUM_TRIALS):
        started_s = time.perf_counter()
        runner.compute_unstored(num_tokens)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
