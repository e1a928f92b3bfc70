"""One model over several partitions, each with lanes, claims and a dead letter of its own, and placed by itself.

``layout.py`` says which partition a request goes to, ``finder.py`` puts requests there and finds them by their ids,
``whole.py`` shows queue and dead letter of the model as one, ``history.py`` what happened, ``change.py`` gives a model
more partitions or fewer, and ``homes.py`` says which of them an engine serves first. To the broker's scripts a
partition is a model.
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
