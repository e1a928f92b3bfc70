"""More than one Redis: a home for everything without a model, and shards for models.

``addresses.py`` reads which there are, ``placements.py`` knows which holds a model, ``sharded.py`` has connections that
send each command there, and ``move.py`` takes a model from one to another. With no shards configured none of that runs:
``connect.py`` makes the plain connections. ``cluster.py`` has connections to a Redis cluster, which is a shard as well.
"""

from .addresses import HOME, SHARDS_VARIABLE, ShardsArgument, parse_shards, shards_text
from .connect import check_servers, make_commands, make_connections, make_pair, make_servers
from .move import MoveReport, ShardMover
from .placements import Placements, choose_shard, recorded_places
from .sharded import ShardedCommands, ShardedSubscriber

__all__ = [
    "HOME",
    "SHARDS_VARIABLE",
    "MoveReport",
    "Placements",
    "ShardMover",
    "ShardedCommands",
    "ShardedSubscriber",
    "ShardsArgument",
    "check_servers",
    "choose_shard",
    "make_commands",
    "make_connections",
    "make_pair",
    "make_servers",
    "parse_shards",
    "recorded_places",
    "shards_text",
]
