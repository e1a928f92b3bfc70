"""One model over several partitions, each with its own lanes, claims and dead letter, and its own shard.

``layout.py`` says which partition a request goes to, ``finder.py`` enqueues and finds requests, ``whole.py`` shows
queue and dead letter of the model as one, ``history.py`` its events, ``change.py`` changes the number of partitions,
and ``homes.py`` says which of them an engine serves first. For the broker's scripts a partition is a model.
"""

from .change import change_partitions
from .finder import PartitionedBroker
from .history import open_history, read_series
from .homes import home_order
from .layout import MAX_PARTITIONS, Layout, Layouts, read_layouts
from .whole import open_dead_letter, open_queue, partition_stats

__all__ = [
    "MAX_PARTITIONS",
    "Layout",
    "Layouts",
    "PartitionedBroker",
    "change_partitions",
    "home_order",
    "open_dead_letter",
    "open_history",
    "open_queue",
    "partition_stats",
    "read_layouts",
    "read_series",
]
