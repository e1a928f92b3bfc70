"""Jobs of the agenda, and the sweep, which enqueues due items as arq jobs every second and releases those of dead
processes.

Invariant: work is on the agenda (or in an outbox that a collector reads) until it is done, independent of arq. So arq's
jobs may be lost, duplicated or late. The id of an item's arq job is derived from the item. A second job is refused by
arq while one exists, and by the agenda while a process holds the item.

To add a kind of item, write a function of the context and the item's id, and add it to ``DUE_JOBS``. An arq job of the
kind's name runs it. It returns None when the item is done, or the delay in seconds until it is due again. It may be
cancelled or killed at any point, and is then run again, so it must store its own progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix
from arq.utils import timestamp_ms
from arq.worker import Function, func

from ...shared.errors import BatchEndedError, BatchHeldError, UnknownBatchError, UnknownFileError
from ...shared.process.log import get_logger
from ..background.agenda import DueItem
from ..batches import run_batch
from ..webhooks.event_store import DELIVER
from .budget_warnings import warn_of_budgets
from .context import CutOffError, JobContext, run_held
from .generation import ARQ_JOB
from .settings import JOB_TIMEOUT_S

# Kind of the agenda's item, and name of the job.
RUN_BATCH = "run_batch"
# Another runner, possibly dead, holds the batch; or this host does not have the folder, but another may.
PAUSE_WHILE_HELD_S, PAUSE_WITHOUT_INPUT_S = 2.0, 30.0
PAUSE_WITHOUT_PLACE_S = 10.0

log = get_logger(__name__)

DueJob = Callable[[JobContext, str], Coroutine[Any, Any, float | None]]
# After an unexpected error: often enough to recover soon, rarely enough to keep the log readable.
PAUSE_AFTER_ERROR_S = 30.0

# Limit of due items read per sweep, since no more can start.
MAX_DUE = 500
Collector = Callable[[JobContext], Awaitable[None]]


async def collect_batches(context: JobContext) -> None:
    """Add open batches without a runner to the agenda, and clear the folder's garbage."""
    for batch_id in await context.batches.free_batches():
        # An item that is paused stays paused.
        await context.agenda.add(RUN_BATCH, batch_id, unless_known=True)
    await context.batches.files.clear_garbage()


async def run_open_batch(context: JobContext, batch_id: str) -> float | None:
    """Run a batch to its end. Returns the delay in seconds before another try, if one is needed."""
    try:
        spec = (await context.batches.record(batch_id)).spec
        with context.batch_slots.occupy(spec.tenant) as has_slot:
            if not has_slot:
                return PAUSE_WITHOUT_PLACE_S
            await run_batch(context.batch_client, context.batches, batch_id)
    except (BatchEndedError, UnknownBatchError):
        return None
    except BatchHeldError:
        return PAUSE_WHILE_HELD_S
    except UnknownFileError as error:
        log.error("batch_not_run", batch=batch_id, reason=str(error))
        return PAUSE_WITHOUT_INPUT_S
    return None


async def _deliver_webhook(context: JobContext, event_id: str) -> float | None:
    return await context.delivery.deliver(event_id)


DUE_JOBS: dict[str, DueJob] = {DELIVER: _deliver_webhook, RUN_BATCH: run_open_batch}


def arq_function(kind: str, job: DueJob) -> Function:
    """Return an arq function that runs ``job`` for a due item, and releases the item as the job returns."""

    async def run(ctx: dict[str, Any], item_id: str) -> None:
        context = JobContext.from_ctx(ctx)
        hold = await context.agenda.hold(kind, item_id)
        if hold is None:
            return
        due_in_s: float | None = 0.0
        try:
            due_in_s = await run_held(hold, job(context, item_id))
        except CutOffError:
            return
        except Exception:
            due_in_s = PAUSE_AFTER_ERROR_S
            raise
        finally:
            await asyncio.shield(hold.let_go(due_in_s))

    return func(run, name=kind, timeout=JOB_TIMEOUT_S, keep_result=0)


async def _collect_ends(context: JobContext) -> None:
    await context.outbox.collect()


# Run at every sweep, to add new work to the agenda.
COLLECTORS: tuple[Collector, ...] = (_collect_ends, collect_batches, warn_of_budgets)


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
