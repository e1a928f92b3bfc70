"""Batches as jobs: an item of the agenda for each open batch that nobody runs, in slices like every long job."""

from __future__ import annotations

from ...shared.errors import BatchEndedError, BatchHeldError, UnknownBatchError, UnknownFileError
from ...shared.log import get_logger
from ..batches import run_batch
from .context import JobContext

# The kind of item on the agenda, and so the name of the job.
RUN_BATCH = "run_batch"
# Another runner has it, who may be dead; or this host does not see the folder, and another may.
PAUSE_WHILE_HELD_S, PAUSE_WITHOUT_INPUT_S = 2.0, 30.0
PAUSE_WITHOUT_PLACE_S = 10.0

log = get_logger(__name__)


async def collect_batches(context: JobContext) -> None:
    """Put open batches that nobody runs on the agenda, and clear away what the folder should not hold any more."""
    for batch_id in await context.batches.free_batches():
        # One that is paused there stays so.
        await context.agenda.add(RUN_BATCH, batch_id, unless_known=True)
    await context.batches.files.clear_garbage()


async def run_open_batch(context: JobContext, batch_id: str) -> float | None:
    """Run a batch to its end; returns when it is to be tried again, if there is a reason to."""
    try:
        spec = (await context.batches.record(batch_id)).spec
        with context.batch_places.take(spec.tenant) as has_place:
            if not has_place:
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
