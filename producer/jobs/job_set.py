"""The function set: everything that an arq worker needs to run Penstock's jobs, its own worker or an app's.

Jobs and results are encoded as msgpack of plain data, errors as [code, message, retryable]. No pickle.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from arq.connections import ArqRedis
from arq.cron import CronJob, cron
from arq.worker import Function, Worker, func
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...shared.errors import ConfigurationError, PenstockError, from_wire
from ...shared.redis_access.url import parse_pool
from ...shared.tracing.tracing import open_tracing
from .context import CONTEXT_KEY, JobContext
from .due_jobs import DUE_JOBS, arq_function, sweep
from .generation import generate
from .settings import JOB_TIMEOUT_S, JobSettings

# A generation runs in slices of four minutes. Each slice counts as a try, and so does each crash.
MAX_TRIES = 1000
# A command is retried for about a minute while Redis is away.
RETRIES, MAX_PAUSE_S = 65, 1.0
_ERROR = 1


def serialize(value: dict[str, Any]) -> bytes:
    """Encode a job or result, as arq's ``job_serializer``: plain data, msgspec structs, and exceptions as results.

    Raises:
        TypeError: it contains anything else; arq then refuses the job, or stores the error as its result.
    """
    return _encoder.encode(value)


def deserialize(data: bytes) -> dict[str, Any]:
    """Decode a job or result, as arq's ``job_deserializer``.

    Structs become dicts or lists, and errors those of ``penstock.shared.errors``.
    """
    return _decoder.decode(data)


def _to_plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        code = value.code if isinstance(value, PenstockError) else type(value).__name__
        message = "the job was aborted" if isinstance(value, asyncio.CancelledError) else str(value)
        error = [code, message, isinstance(value, PenstockError) and value.retryable]
        return msgspec.msgpack.Ext(_ERROR, msgspec.msgpack.encode(error))
    raise TypeError(f"jobs take and return plain data (numbers, text, bytes, lists, dicts), got {type(value).__name__}")


def _from_ext(code: int, data: memoryview) -> Any:
    if code != _ERROR:
        raise msgspec.DecodeError(f"unknown extension type {code} in a job")
    return from_wire(*msgspec.msgpack.decode(data, type=tuple[str, str, bool]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(ext_hook=_from_ext)


class JobQueue(ArqRedis):
    """arq's connection to a queue. arq closes it by a method name that redis-py has deprecated."""

    async def close(self, close_connection_pool: bool | None = None) -> None:
        await self.aclose(close_connection_pool)


class JobSet:
    """Penstock's jobs as parts of an arq worker's settings.

            jobs = JobSet(JobSettings(redis_url="redis://localhost"))

            class WorkerSettings:
                functions = [*jobs.functions, my_own_job]
                cron_jobs = jobs.cron_jobs
                on_startup = jobs.on_startup
                on_shutdown = jobs.on_shutdown
                redis_pool = jobs.pool()
                queue_name = jobs.queue_name
                job_serializer = jobs.job_serializer
                job_deserializer = jobs.job_deserializer

    A worker with its own hooks awaits these in them: ``await jobs.on_startup(ctx)`` first, ``on_shutdown`` last.
    """

    job_serializer = staticmethod(serialize)
    job_deserializer = staticmethod(deserialize)

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings

    @property
    def queue_name(self) -> str:
        """Name of arq's queue of these jobs."""
        return self.settings.queue

    @property
    def functions(self) -> list[Function]:
        """``generate``, and the jobs of the agenda."""
        generation = func(
            generate,
            name="generate",
            timeout=JOB_TIMEOUT_S,
            max_tries=MAX_TRIES,
            keep_result=self.settings.result_ttl_s,
        )
        return [generation, *(arq_function(kind, job) for kind, job in DUE_JOBS.items())]

    @property
    def cron_jobs(self) -> list[CronJob]:
        """The sweep. Its name includes the namespace, since arq's ids of cron jobs are unique per Redis."""
        return [
            cron(
                sweep,
                name=self._sweep_name,
                second=set(range(0, 60, self.settings.sweep_every_s)),
                run_at_startup=True,
                keep_result=0,
                timeout=JOB_TIMEOUT_S,
            )
        ]

    @property
    def _sweep_name(self) -> str:
        return f"{self.settings.namespace}:sweep"

    async def on_startup(self, ctx: dict[str, Any]) -> None:
        """Open the clients for the jobs of this process.

        Raises:
            ConfigurationError: Redis is unusable, or the worker would encode these jobs with pickle.
        """
        if ctx["redis"].job_serializer is None:
            raise ConfigurationError(
                "this arq worker encodes jobs with pickle, which is not supported: set job_serializer and "
                "job_deserializer in WorkerSettings to those of the JobSet, or keep pickled jobs in another queue "
                "and worker"
            )
        # In a thread, because it waits for threads that query the host's name.
        tracing = await asyncio.to_thread(open_tracing, self.settings.otlp_traces_endpoint, "penstock-jobs")
        # In a thread, because its sender of webhooks reads certificates.
        context = await asyncio.to_thread(JobContext, self.settings, tracing)
        try:
            await context.open()
        except BaseException:
            await context.close()
            raise
        ctx[CONTEXT_KEY] = context

    async def on_shutdown(self, ctx: dict[str, Any]) -> None:
        """Close everything that ``on_startup`` opened."""
        if CONTEXT_KEY in ctx:
            await JobContext.from_ctx(ctx).close()

    def pool(self) -> JobQueue:
        """Return arq's connection to the queue: ``await pool.enqueue_job("generate", prompt, params)``.

        URLs have the same meaning as everywhere in Penstock, unlike in arq's ``RedisSettings.from_dsn``.
        """
        connections = parse_pool(
            self.settings.redis_url,
            retry=Retry(ExponentialBackoff(cap=MAX_PAUSE_S, base=0.05), RETRIES),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        return JobQueue(
            connections, job_serializer=serialize, job_deserializer=deserialize, default_queue_name=self.queue_name
        )

    def worker(self, *, burst: bool = False) -> Worker:
        """Return an arq worker with these jobs alone, for the running event loop; in a burst it ends when no job is
        due."""
        settings = self.settings
        # The queue may contain a sweep of another process.
        sweep_functions = [func(sweep, name=self._sweep_name, keep_result=0)] if burst else []
        return Worker(
            [*self.functions, *sweep_functions],
            queue_name=self.queue_name,
            # No cron jobs in a burst, which ends when the queue is empty.
            cron_jobs=None if burst else self.cron_jobs,
            redis_pool=self.pool(),
            burst=burst,
            on_startup=partial(_start_burst, self) if burst else self.on_startup,
            on_shutdown=self.on_shutdown,
            job_completion_wait=settings.drain_timeout_s,
            max_jobs=settings.max_jobs,
            job_timeout=JOB_TIMEOUT_S,
            keep_result=settings.result_ttl_s,
            poll_delay=settings.poll_delay_s,
            health_check_interval=settings.health_check_interval_s,
            job_serializer=serialize,
            job_deserializer=deserialize,
            log_results=False,
        )


async def _start_burst(jobs: JobSet, ctx: dict[str, Any]) -> None:
    await jobs.on_startup(ctx)
    await sweep(ctx)
