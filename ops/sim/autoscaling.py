"""The wanted number of engines."""

from __future__ import annotations

import math

from ..metrics.wanted import wanted_for_waiting
from .scenario import Autoscaling


def wanted_engines(
    rule: Autoscaling, *, num_engines: int, busy: float, waiting_tokens: float, tokens_per_s: float
) -> int:
    """Return the engines that running requests fill, plus those that serve waiting ones within ``wanted_wait_s``.

    Args:
        num_engines: engines that serve now.
        busy: used share of their sequences, in [0, 1].
        waiting_tokens: tokens of waiting requests, prompts and maximum outputs.
        tokens_per_s: such tokens that all engines serve per second when they are full; 0 if unknown.
    """
    of_one = tokens_per_s / max(1, num_engines)
    load = busy * num_engines + wanted_for_waiting(waiting_tokens, of_one, rule.wanted_wait_s)
    return min(rule.most, max(rule.least, math.ceil(load - 1e-9)))
