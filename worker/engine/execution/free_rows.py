"""How many tokens a forward computes in little more time than one: what is there for guesses (decision 0083)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog
import torch

from ..scheduling.guessing import STEP_COST
from .model_runner import ModelRunner

# Tokens of a forward that are tried. On a CPU products work on 6 rows at a time, or on 16 with matrix tiles.
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
# What else runs on the machine makes a forward longer, and never shorter: so the least of so many counts, and a size is
# given up only when none of so many was short enough.
_NUM_TRIALS = 6

log = structlog.get_logger(__name__)


@torch.inference_mode()
def measure_free_rows(runner: ModelRunner, most: int) -> int:
    """Return how many tokens a step may have and still take hardly longer than one of a single token: 1 to ``most``.

    Caches have to be allocated, and stay as they are.
    """
    least_s = min(_times_s(runner, 1))
    found = 1
    for size in _SIZES:
        if size > most or not any(time_s <= (1 + STEP_COST) * least_s for time_s in _times_s(runner, size)):
            break
        found = size
    log.info("free_rows", num_free_rows=found, time_of_one_ms=round(least_s * 1e3, 3))
    return found


def _times_s(runner: ModelRunner, num_tokens: int) -> Iterator[float]:
    """How long a forward of so many tokens takes, each time that it is computed."""
    runner.compute_unstored(num_tokens)  # what is made when it is needed, is made
    for _ in range(_NUM_TRIALS):
        started_s = time.perf_counter()
        runner.compute_unstored(num_tokens)
        yield time.perf_counter() - started_s
