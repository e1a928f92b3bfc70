"""A process that runs our jobs alone, as ``penstock jobs`` does."""

from __future__ import annotations

import asyncio
import signal

from arq.constants import health_check_key_suffix
from arq.worker import Worker
from redis.exceptions import ResponseError, WatchError

from ...shared.errors import RedisUnavailableError
from ...shared.log import get_logger
from ...shared.redis_access.link import LOST, Outage, refuses_for_now
from ...shared.service_manager import tell_ready, tell_stopping
from ...shared.shards import check_servers
from .job_set import JobSet
from .settings import JobSettings

PAUSE_AFTER_OUTAGE_S = 1.0
# redis-py says WatchError of a connection that is lost while arq watches a key. Our client says the last one when the
# server goes away again while a worker starts.
OUTAGES = (*LOST, WatchError, RedisUnavailableError)

log = get_logger(__name__)


async def run_jobs(settings: JobSettings, *, burst: bool = False) -> None:
    """Run jobs until SIGTERM or SIGINT; in a burst, until none is due. A Redis that is away or full is waited for.

    Raises:
        ConfigurationError: Redis cannot be reached or used when it begins.
    """
    await check_servers(
        settings.redis_url, settings.shards, namespace=settings.namespace, for_jobs=True, is_service=True
    )
    jobs, outage = JobSet(settings), Outage(settings.redis_url, "jobs")
    tell_ready(f"runs jobs of {jobs.queue_name}")
    log.info("jobs_started", queue=jobs.queue_name, functions=sorted(function.name for function in jobs.functions))
    while True:
        worker = jobs.worker(burst=burst)
        try:
            await _run(jobs, worker)
            tell_stopping()
            return
        except (*OUTAGES, ResponseError) as error:
            if isinstance(error, ResponseError) and not refuses_for_now(error):
                raise
            outage.note(error)
        # Those of a worker that has ended would do nothing.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        await asyncio.sleep(PAUSE_AFTER_OUTAGE_S)


async def _run(jobs: JobSet, worker: Worker) -> None:
    try:
        await worker.async_run()
    except asyncio.CancelledError:
        # So arq ends on a signal; anything else that cancels is the caller's.
        if worker.main_task is None or not worker.main_task.cancelled():
            raise
    finally:
        pool = worker.pool
        # A job may be cancelled while its end is being written, and arq's close would raise that.
        await asyncio.gather(*worker.tasks.values(), return_exceptions=True)
        worker.tasks.clear()
        try:
            await worker.close()
        finally:
            # arq stops closing at the first thing that fails.
            await jobs.on_shutdown(worker.ctx)
            await pool.aclose(close_connection_pool=True)


async def is_healthy(settings: JobSettings) -> bool:
    """Whether a process has said lately that it runs these jobs."""
    await check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, for_jobs=True)
    pool = JobSet(settings).pool()
    try:
        return bool(await pool.exists(settings.queue + health_check_key_suffix))
    finally:
        await pool.aclose(close_connection_pool=True)
