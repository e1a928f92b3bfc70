"""The sweep: every second, what is due becomes an arq job, and what a dead process ran is set free.

Invariant: what is to be done is on the agenda (or in an outbox that a collector reads) until it is done, whatever arq
knows of it. So arq's jobs may be lost, doubled or late: the id of an item's job is the item's, a second one is refused
by arq while there is one, and by the agenda while somebody is at it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix
from arq.utils import timestamp_ms

from ..agenda import DueItem
from .batches import collect_batches
from .context import JobContext
from .generation import ARQ_JOB

# Of what waits for a free place among the running jobs, no more has to be looked at in a sweep.
MAX_DUE = 500


async def _collect_ends(context: JobContext) -> None:
    await context.outbox.collect()


Collector = Callable[[JobContext], Awaitable[None]]

# What is run at every sweep, to put on the agenda what it does not know yet.
COLLECTORS: tuple[Collector, ...] = (_collect_ends, collect_batches)


async def sweep(ctx: dict[str, Any]) -> None:
    """Collect what is new, and enqueue what is due. Any number of processes may do it."""
    context, queue = JobContext.of(ctx), ctx["redis"]
    for collect in COLLECTORS:
        await collect(context)
    for item in await context.agenda.due(MAX_DUE):
        await _take_up(context, queue, item)


async def _take_up(context: JobContext, queue: ArqRedis, item: DueItem) -> None:
    if item.kind == ARQ_JOB:
        await queue.delete(in_progress_key_prefix + item.item_id)
        # Under the token of the dead: if the job has begun again meanwhile, its hold is left alone.
        await context.agenda.let_go(f"{item.kind}:{item.item_id}", item.token, None)
        return
    job_id = f"{context.keys.namespace}:{item.kind}:{item.item_id}"
    if item.token:
        await queue.delete(in_progress_key_prefix + job_id)
    job = await queue.enqueue_job(item.kind, item.item_id, _job_id=job_id)
    if job is None and (due_ms := await queue.zscore(queue.default_queue_name, job_id)) is not None:
        # There is one. arq keeps when it is due by its host's clock, which may have been set back since.
        await queue.zadd(queue.default_queue_name, {job_id: min(due_ms, timestamp_ms())}, xx=True)
