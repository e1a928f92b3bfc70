"""The sweep: every second, due items become arq jobs, and items of dead processes are released.

Invariant: work is on the agenda (or in an outbox that a collector reads) until it is done, independent of arq. So arq's
jobs may be lost, duplicated or late. The id of an item's arq job is derived from the item. A second job is refused by
arq while one exists, and by the agenda while a process holds the item.
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

# Limit of due items read per sweep, since no more can start.
MAX_DUE = 500


async def _collect_ends(context: JobContext) -> None:
    await context.outbox.collect()


Collector = Callable[[JobContext], Awaitable[None]]

# Run at every sweep, to add new work to the agenda.
COLLECTORS: tuple[Collector, ...] = (_collect_ends, collect_batches)


async def sweep(ctx: dict[str, Any]) -> None:
    """Collect new work, and enqueue due items. Any number of processes may do this."""
    context, queue = JobContext.from_ctx(ctx), ctx["redis"]
    for collect in COLLECTORS:
        await collect(context)
    for item in await context.agenda.due(MAX_DUE):
        await _enqueue(context, queue, item)


async def _enqueue(context: JobContext, queue: ArqRedis, item: DueItem) -> None:
    if item.kind == ARQ_JOB:
        await queue.delete(in_progress_key_prefix + item.item_id)
        # Released with the token of the dead process: if the job has started again, its new hold is not affected.
        await context.agenda.let_go(f"{item.kind}:{item.item_id}", item.token, None)
        return
    job_id = f"{context.keys.namespace}:{item.kind}:{item.item_id}"
    if item.token:
        await queue.delete(in_progress_key_prefix + job_id)
    job = await queue.enqueue_job(item.kind, item.item_id, _job_id=job_id)
    if job is None and (due_ms := await queue.zscore(queue.default_queue_name, job_id)) is not None:
        # The job exists already. arq stores its due time by its host's clock, which may have been set back since.
        await queue.zadd(queue.default_queue_name, {job_id: min(due_ms, timestamp_ms())}, xx=True)
