"""Run batches as jobs: each open batch without a runner is an item of the agenda, and runs in slices like every long
job."""

from __future__ import annotations

from ...shared.errors import BatchEndedError, BatchHeldError, UnknownBatchError, UnknownFileError
from ...shared.log import get_logger
from ..batches import run_batch
from .context import JobContext

# Kind of the agenda's item, and name of the job.
RUN_BATCH = "run_batch"
# Another runner, possibly dead, holds the batch; or this host does not have the folder, but another may.
PAUSE_WHILE_HELD_S, PAUSE_WITHOUT_INPUT_S = 2.0, 30.0
PAUSE_WITHOUT_PLACE_S = 10.0

log = get_logger(__name__)


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
