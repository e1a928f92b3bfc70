"""Connections of a deployment: plain ones to one Redis, or those that know its shards, and a check of its servers."""

from __future__ import annotations

from ..connection import RETRY_FOR_S, CommandConnection
from ..errors import RedisUnavailableError
from ..keys import Keys
from ..process.log import get_logger
from ..redis_access.check import check_redis, check_server
from ..redis_access.link import LOST, unavailable_error
from ..redis_access.rights import cluster_probes
from ..redis_access.subscriber import Subscriber
from ..values.names import DEFAULT_NAMESPACE
from ..values.shown import mask_url
from .addresses import HOME, ShardsArgument, parse_shards
from .cluster import ClusterCommands, ClusterSubscriber
from .cluster_topology import Topology, is_cluster_url
from .sharded import ShardedCommands, ShardedSubscriber

log = get_logger(__name__)


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


async def check_servers(
    url: str,
    shards: ShardsArgument = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    for_worker: bool = False,
    for_jobs: bool = False,
    is_service: bool = False,
) -> None:
    """Verify home and shards as ``check_redis`` does.

    A shard that is away is told in the log only: the models of the others go on.

    Args:
        for_jobs: concerns home, where jobs are.

    Raises: as ``check_redis``; ConfigurationError of shards that cannot be read.
    """
    await check_redis(url, namespace=namespace, for_worker=for_worker, for_jobs=for_jobs, is_service=is_service)
    for name, shard_url in parse_shards(shards).items():
        try:
            if is_cluster_url(shard_url):
                await _check_cluster(shard_url, namespace, for_worker=for_worker, is_service=is_service)
            else:
                await check_redis(shard_url, namespace=namespace, for_worker=for_worker, is_service=is_service)
        except RedisUnavailableError as error:
            log.warning("shard_away", shard=name, url=mask_url(shard_url), reason=str(error))


async def _check_cluster(url: str, namespace: str, *, for_worker: bool, is_service: bool) -> None:
    """Verify each primary, and what we need to do at the one that would serve a model."""
    topology = Topology(url)
    try:
        await topology.ask()
    except LOST as error:
        raise unavailable_error(url, error) from error
    key = Keys(namespace).model("probe").absent
    for node in topology.nodes:
        calls = cluster_probes(namespace) if node == topology.node_of(key) else ()
        await check_server(node, calls, namespace=namespace, for_worker=for_worker, is_service=is_service, is_node=True)
