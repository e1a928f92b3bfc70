"""One model over several partitions, each with its own lanes, claims and dead letter, and its own shard.

``layout.py`` says which partition a request goes to and which one an engine serves first, ``finder.py`` enqueues and
finds requests, ``whole.py`` shows queue, homes, dead letter and history of the model as one, and ``change.py`` changes
the number of partitions. For the broker's scripts a partition is a model.
"""

from .change import change_partitions
from .finder import PartitionedBroker
from .layout import MAX_PARTITIONS, Layout, Layouts, home_order, read_layouts
from .whole import (
    open_dead_letter,
    open_history,
    open_homes,
    open_queue,
    partition_stats,
    read_ledger,
    read_rate_limits,
    read_series,
)

__all__ = [
    "MAX_PARTITIONS",
    "Layout",
    "Layouts",
    "PartitionedBroker",
    "change_partitions",
    "home_order",
    "open_dead_letter",
    "open_history",
    "open_homes",
    "open_queue",
    "partition_stats",
    "read_layouts",
    "read_ledger",
    "read_rate_limits",
    "read_series",
]
