"""An app's own arq worker with our jobs in it: `arq app_worker.WorkerSettings`."""

from __future__ import annotations

import os
from typing import Any

from penstock.producer.jobs import JobSet, JobSettings

jobs = JobSet(JobSettings(redis_url=os.environ["APP_REDIS_URL"], namespace=os.environ["APP_NAMESPACE"], lease_ttl_s=1))


async def shout(ctx: dict[str, Any], text: str) -> str:
    return text.upper() + ctx["mark"]


async def startup(ctx: dict[str, Any]) -> None:
    await jobs.on_startup(ctx)
    ctx["mark"] = "!"


class WorkerSettings:
    functions = [*jobs.functions, shout]  # noqa: RUF012  # as arq's users write it
    cron_jobs = jobs.cron_jobs
    on_startup = startup
    on_shutdown = jobs.on_shutdown
    redis_pool = jobs.pool()
    queue_name = jobs.queue_name
    job_serializer = jobs.job_serializer
    job_deserializer = jobs.job_deserializer
