"""Jobs that the agenda asks for: each kind of item has a function, and an arq job of the same name runs it.

To add a kind, write a function that takes the context and the item's id, and enter it in ``DUE_JOBS``. It returns None
when the item is done, or in how many seconds it is due again. It may be cancelled or killed at any point, and is then
run again; what it has to remember it writes itself.
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

# After an error that nobody foresaw: often enough to get well soon, seldom enough to read the log.
PAUSE_AFTER_ERROR_S = 30.0


async def _deliver_webhook(context: JobContext, event_id: str) -> float | None:
    return await context.delivery.deliver(event_id)


DUE_JOBS: dict[str, DueJob] = {DELIVER: _deliver_webhook, RUN_BATCH: run_open_batch}


def arq_function(kind: str, job: DueJob) -> Function:
    """Return an arq function that runs ``job`` for an item that is due, and lets go of it as the job says."""

    async def run(ctx: dict[str, Any], item_id: str) -> None:
        context = JobContext.of(ctx)
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
