"""Can a deployment be worked with: its home, and each of its shards?"""

from __future__ import annotations

import structlog

from ..errors import RedisUnavailableError
from ..keys import DEFAULT_NAMESPACE
from ..redis_check import check_redis
from ..redis_url import mask_url
from .addresses import ShardsArgument, parse_shards

log = structlog.get_logger()


async def check_servers(
    url: str,
    shards: ShardsArgument = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    for_worker: bool = False,
    for_jobs: bool = False,
) -> None:
    """Verify home and shards as ``check_redis`` does.

    A shard that is away is told in the log only: the models of the others go on.

    Args:
        for_jobs: concerns home, where jobs are.

    Raises: as ``check_redis``; ConfigurationError of shards that cannot be read.
    """
    await check_redis(url, namespace=namespace, for_worker=for_worker, for_jobs=for_jobs)
    for name, shard_url in parse_shards(shards).items():
        try:
            await check_redis(shard_url, namespace=namespace, for_worker=for_worker)
        except RedisUnavailableError as error:
            log.warning("shard_away", shard=name, url=mask_url(shard_url), reason=str(error))
