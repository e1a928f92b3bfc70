"""Process of ``penstock jobs``, which runs only Penstock's jobs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from arq.constants import health_check_key_suffix
from arq.worker import Worker
from redis.exceptions import ResponseError, WatchError

from ...shared.errors import RedisUnavailableError
from ...shared.process.log import get_logger
from ...shared.process.service_manager import tell_ready, tell_stopping
from ...shared.process.waiting import wait_at_most
from ...shared.redis_access.link import LOST, Outage, refuses_for_now
from ...shared.shards import check_servers
from .job_set import JobSet
from .settings import JobSettings

PAUSE_AFTER_OUTAGE_S = 1.0
# Limit of each step of closing, since Redis may be away. An end of a job that is not written is written by the process
# that runs the job again.
CLOSE_TIMEOUT_S = 3.0
# redis-py raises WatchError if a connection is lost while arq watches a key. Penstock's client raises the last one if
# the server goes away again while a worker starts.
OUTAGES = (*LOST, WatchError, RedisUnavailableError)

log = get_logger(__name__)


async def run_jobs(settings: JobSettings, *, burst: bool = False) -> None:
    """Run jobs until SIGTERM or SIGINT; in a burst, until none is due. Waits while Redis is away or full.

    Raises:
        ConfigurationError: Redis cannot be reached or used at the start.
    """
    await check_servers(
        settings.redis_url, settings.shards, namespace=settings.namespace, for_jobs=True, is_service=True
    )
    jobs, outage = JobSet(settings), Outage(settings.redis_url, "jobs")
    tell_ready(f"runs jobs of {jobs.queue_name}")
    log.info("jobs_started", queue=jobs.queue_name, functions=sorted(function.name for function in jobs.functions))
    stop = asyncio.Event()
    while not stop.is_set():
        worker = jobs.worker(burst=burst)
        _stop_on_signals(worker, stop, settings.drain_timeout_s)
        try:
            await _run_worker(jobs, worker)
            break
        except (*OUTAGES, ResponseError) as error:
            if isinstance(error, ResponseError) and not refuses_for_now(error):
                raise
            outage.note(error)
        await wait_at_most(PAUSE_AFTER_OUTAGE_S, stop.wait())
    tell_stopping()


def _stop_on_signals(worker: Worker, stop: asyncio.Event, drain_timeout_s: float) -> None:
    """Replace arq's signal handlers by ones that also set ``stop``, for signals between two workers."""

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        if drain_timeout_s:
            worker.handle_sig_wait_for_completion(number)
        else:
            worker.handle_sig(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


async def _run_worker(jobs: JobSet, worker: Worker) -> None:
    try:
        await worker.async_run()
    except asyncio.CancelledError:
        # arq ends in this way after a signal. Any other cancellation is the caller's.
        if worker.main_task is None or not worker.main_task.cancelled():
            raise
    finally:
        # Each step runs even if an earlier one fails, which arq's close does not do by itself.
        async with AsyncExitStack() as closing:
            closing.push_async_callback(_close_in_time, partial(worker.pool.aclose, close_connection_pool=True))
            closing.push_async_callback(_close_in_time, partial(jobs.on_shutdown, worker.ctx))
            closing.push_async_callback(_close_in_time, worker.close)
            closing.push_async_callback(_close_in_time, partial(_end_tasks, worker))


async def _end_tasks(worker: Worker) -> None:
    """Wait for the tasks of jobs. One may be cancelled while its end is written, which arq's close would raise."""
    tasks = list(worker.tasks.values())
    worker.tasks.clear()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close_in_time(step: Callable[[], Awaitable[object]]) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await step()
    except TimeoutError:
        log.warning("jobs_not_closed", reason=f"no answer of Redis within {CLOSE_TIMEOUT_S:g} s")


async def is_healthy(settings: JobSettings) -> bool:
    """Return whether a process has recently reported that it runs these jobs."""
    await check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, for_jobs=True)
    pool = JobSet(settings).pool()
    try:
        return bool(await pool.exists(settings.queue + health_check_key_suffix))
    finally:
        await pool.aclose(close_connection_pool=True)
