"""How many engines are wanted."""

from __future__ import annotations

import math

from ..metrics.wanted import wanted_for_waiting
from .scenario import Autoscaling


def wanted_engines(
    rule: Autoscaling, *, num_engines: int, busy: float, waiting_tokens: float, tokens_per_s: float
) -> int:
    """As many as what runs fills, and those that serve what waits within ``wanted_wait_s``.

    Args:
        num_engines: that serve now.
        busy: the part of their sequences that is taken, in [0, 1].
        waiting_tokens: prompts and most output of what waits.
        tokens_per_s: what all engines serve of these when they are full; 0 while that is unknown.
    """
    of_one = tokens_per_s / max(1, num_engines)
    wanted = busy * num_engines + wanted_for_waiting(waiting_tokens, of_one, rule.wanted_wait_s)
    return min(rule.most, max(rule.least, math.ceil(wanted - 1e-9)))
