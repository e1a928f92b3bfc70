"""The order in which an engine serves partitions."""

from __future__ import annotations

import math

# Steps by it fall evenly, however many there are.
_GOLDEN = 0.6180339887498949


def home_order(rank: int, num_engines: int, num_partitions: int, turn: int) -> list[int]:
    """Return the homes of an engine in the order in which its claim number ``turn`` tries them.

    Partitions lie in a row, and each engine has a part of it that is as long as that of any other, the ``rank``-th. So
    each partition has as much of the engines' time, however few they are, and if one dies the others move up. An engine
    with parts of several begins with each as often as its part is long.
    """
    low, high = rank * num_partitions / num_engines, (rank + 1) * num_partitions / num_engines
    homes = [*range(int(low), min(num_partitions, math.ceil(high)))]
    place = homes.index(min(homes[-1], int(low + (turn * _GOLDEN % 1.0) * (high - low))))
    return homes[place:] + homes[:place]
