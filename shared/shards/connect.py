"""Connections of a deployment: plain ones to one Redis, or those that know its shards."""

from __future__ import annotations

from ..connection import RETRY_FOR_S, CommandConnection
from ..keys import Keys
from ..redis_access.subscriber import Subscriber
from .addresses import HOME, ShardsArgument, parse_shards
from .cluster import ClusterCommands, ClusterSubscriber
from .cluster_topology import Topology, is_cluster_url
from .sharded import ShardedCommands, ShardedSubscriber


def make_connections(
    url: str, shards: ShardsArgument, keys: Keys, *, retry_for_s: float = RETRY_FOR_S
) -> tuple[CommandConnection, Subscriber]:
    """Return the two connections that all tasks of a process share; nothing is connected yet.

    Args:
        url: of the home Redis.
        shards: as ``parse_shards`` takes them.

    Raises:
        ConfigurationError: a URL cannot be read.
    """
    pairs = {name: make_pair(shard_url, retry_for_s) for name, shard_url in parse_shards(shards).items()}
    if not pairs:
        return make_pair(url, retry_for_s)
    own: list[ShardedSubscriber] = []
    commands = ShardedCommands(
        url,
        {name: pair[0] for name, pair in pairs.items()},
        keys,
        retry_for_s=retry_for_s,
        on_moved=lambda: own[0].reconnect(),
    )
    own.append(ShardedSubscriber(url, {name: pair[1] for name, pair in pairs.items()}, keys, commands.placements))
    return commands, own[0]


def make_commands(
    url: str, shards: ShardsArgument, keys: Keys, *, retry_for_s: float = RETRY_FOR_S
) -> CommandConnection:
    """Return the connection for commands alone; as ``make_connections``."""
    return make_connections(url, shards, keys, retry_for_s=retry_for_s)[0]


def make_servers(url: str, shards: ShardsArgument) -> dict[str, CommandConnection]:
    """Return a plain connection to home and to each shard, by name; as ``make_connections``."""
    return {name: make_pair(at, RETRY_FOR_S)[0] for name, at in {HOME: url, **parse_shards(shards)}.items()}


def make_pair(url: str, retry_for_s: float = RETRY_FOR_S) -> tuple[CommandConnection, Subscriber]:
    """Return the two connections to one server or cluster."""
    if is_cluster_url(url):
        topology = Topology(url)
        return ClusterCommands(topology, retry_for_s=retry_for_s), ClusterSubscriber(topology)
    subscriber = Subscriber(url)
    return CommandConnection(url, retry_for_s=retry_for_s, on_moved=subscriber.reconnect), subscriber
