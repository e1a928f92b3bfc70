"""Jobs of the agenda: each kind of item has a function, and an arq job of the same name runs it.

To add a kind, write a function of the context and the item's id, and add it to ``DUE_JOBS``. It returns None when the
item is done, or the delay in seconds until it is due again. It may be cancelled or killed at any point, and is then run
again, so it must store its own progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from arq.worker import Function, func

from ..webhooks.event_store import DELIVER
from .batches import RUN_BATCH, run_open_batch
from .context import JobContext
from .holding import CutOffError, run_held
from .settings import JOB_TIMEOUT_S

DueJob = Callable[[JobContext, str], Coroutine[Any, Any, float | None]]

# After an unexpected error: often enough to recover soon, rarely enough to keep the log readable.
PAUSE_AFTER_ERROR_S = 30.0


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
