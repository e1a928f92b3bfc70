"""Checks whether a deployment can be used: its home, and each of its shards."""

from __future__ import annotations

from ..errors import RedisUnavailableError
from ..keys import Keys
from ..process.log import get_logger
from ..redis_access.check import check_redis, check_server
from ..redis_access.link import LOST, unavailable_error
from ..redis_access.needs import cluster_probes
from ..values.names import DEFAULT_NAMESPACE
from ..values.urls import mask_url
from .addresses import ShardsArgument, parse_shards
from .cluster_topology import Topology, is_cluster_url

log = get_logger(__name__)


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
