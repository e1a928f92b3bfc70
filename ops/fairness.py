"""How evenly tenants are served."""

from __future__ import annotations

import math
from collections.abc import Sequence


def jain_index(values: Sequence[float]) -> float:
    """1 where all are equal, 1/n where one has all (Jain et al., 1984); NaN for fewer than two, or if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else math.nan
