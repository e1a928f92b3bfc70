"""Run a batch from its current state to its end.

Invariant: no matter what is killed, or stopped and resumed, and how many runners there are, each ``custom_id`` has
exactly one line in the files of the ended batch.

- A row is a detached request whose id is derived from batch and row: submitted twice, it is one request.
- A row counts once its answer is in the journal on disk; otherwise it is submitted again.
- The output files are written from the journal in one pass that uses each row once, under names unique to this holder.
- One script, which only the holder of the lease may run, ends the batch and publishes these files, and no others.

So repeated writes to Redis and files have no effect, and no step depends on knowing which one died before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator

import msgspec

from ...shared.errors import BatchTakenOverError, UnknownFileError, UnknownModelError, ValidationError
from ...shared.process.log import get_logger
from ...shared.values.shown import shown
from ..background.concurrency import LongWork, in_long_thread
from ..client import Client
from ..openai.parsers import ParserChoice
from .answers import Rows, all_or_none
from .batch_records import Batch, BatchStatus, RowProblem, RowProblems
from .batch_store import BatchStore
from .input_rows import InputRow, InputRows, check_linked
from .journal import Journal, Tally, count_rows, journal_path, write_output
from .lease import Fields, Lease

# Concurrent rows: enough to fill an engine's batch, and few for the queue to hold.
DEFAULT_WINDOW = 128
MAX_WINDOW = 10_000
BATCH_BAND = "batch"
# How long results wait in Redis for a runner that died. If its replacement takes longer, its window is computed again.
ROW_RESULT_TTL_S = 900.0
_CANCEL_BATCH_SIZE = 256

PARSERS_BY_CARD = ParserChoice()

OnProgress = Callable[[Tally], None]

log = get_logger(__name__)


async def run_batch(
    client: Client,
    store: BatchStore,
    batch_id: str,
    *,
    window: int = DEFAULT_WINDOW,
    slice_s: float | None = None,
    parsers: ParserChoice = PARSERS_BY_CARD,
    on_progress: OnProgress = lambda _: None,
) -> Batch:
    """Run a batch from its current state to its end, or for a slice of time. Returns it in its state then.

    Any process may call this for any open batch, since the lease admits one at a time. If the call ends early for any
    reason, finished rows are kept, and the next call continues. Running requests keep running, and the next run
    attaches to them.

    Args:
        client: submits the rows. Its ``result_ttl_s`` is how long an answer waits for a runner (ROW_RESULT_TTL_S is
            enough); its ``tenant`` is not used.
        window: limit of concurrent rows.
        slice_s: stop after this time with the batch still open; None runs to the end.
        parsers: parsers of tool calls and reasoning in chat answers; by default those of the model's card.
        on_progress: called after each row.

    Raises:
        ValidationError: ``window`` is out of range.
        UnknownBatchError: no batch has this id.
        BatchEndedError: it has ended, and its end was reported.
        BatchHeldError: another runner holds it; BatchTakenOverError: another runner claimed it meanwhile.
        UnknownFileError: this process's folder does not contain the input.
        RedisUnavailableError: Redis was away for longer than client or store wait for it.
        OSError: the folder cannot be read or output.
    """
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
        raise ValidationError(f"window must be 1 to {MAX_WINDOW}, got {shown(window)}")
    async with await store.claim(batch_id) as lease:
        log.info("batch_started", batch=batch_id, epoch=lease.epoch)
        record = await store.record(batch_id)
        if not record.batch.status.is_end:
            await _Run(client, store, lease, parsers, window, slice_s, on_progress).run(record.batch)
            record = await store.record(batch_id)
        if record.batch.status.is_end:
            await store.report_end(record)
            if not await lease.close():
                raise BatchTakenOverError(
                    f"batch {shown(batch_id)} was taken over by another runner, which reports its end"
                )
        return record.batch


class _Run:
    """The work of one runner on a batch."""

    def __init__(
        self,
        client: Client,
        store: BatchStore,
        lease: Lease,
        parsers: ParserChoice,
        window: int,
        slice_s: float | None,
        on_progress: OnProgress,
    ) -> None:
        self._client = client
        self._store = store
        self._lease = lease
        self._parsers = parsers
        self._window = window
        self._stop_at = None if slice_s is None else time.monotonic() + slice_s
        self._on_progress = on_progress
        self._spec = lease.spec
        self._folder = store.files.contents.work(lease.spec.id)

    async def run(self, batch: Batch) -> None:
        """Run the batch as far as possible."""
        checked = await self._checked_input()
        if not isinstance(checked, InputRows):
            await self._fail(checked)
            return
        try:
            await self._run_rows(batch, checked)
        finally:
            checked.close()

    async def _run_rows(self, batch: Batch, inputs: InputRows) -> None:
        try:
            band = await self._band(inputs.model)
        except UnknownModelError as error:
            await self._fail([RowProblem(code="model_not_found", message=str(error), param="body.model")])
            return
        card = await self._client.get_model_config(inputs.model)  # for an adapter, the card of its base model
        rows = Rows(self._client, self._spec, band, self._parsers.for_model(card))
        status = batch.status
        if status is BatchStatus.VALIDATING:
            fields: Fields = {"total": len(inputs), "model": inputs.model}
            status = await self._lease.write(BatchStatus.IN_PROGRESS, fields)
        tally = await in_long_thread(LongWork.BATCHES, count_rows, self._folder, len(inputs))
        self._lease.counts = lambda: {"completed": tally.completed, "failed": tally.failed}
        self._on_progress(tally)
        if status is BatchStatus.IN_PROGRESS:
            if not await self._feed(rows, inputs, tally):
                return
            # If the batch was cancelled, nothing is written, and the status shows it.
            status = await self._lease.write(BatchStatus.FINALIZING, self._lease.counts())
        is_cancelled = status is BatchStatus.CANCELLING
        if 0 in tally.is_done:
            await self._cancel_rows(rows, inputs, tally)
        await self._finish_batch(rows, inputs, is_cancelled=is_cancelled)

    async def _checked_input(self) -> InputRows | list[RowProblem]:
        """Return the rows. The input is first linked to the working folder, so that its file may be deleted."""
        await self._store.files.contents.prepare()
        source = self._store.files.contents.path(self._spec.input_file_id)
        try:
            return await in_long_thread(LongWork.BATCHES, check_linked, source, self._folder, self._spec.endpoint)
        except FileNotFoundError:
            file_id = self._spec.input_file_id
            if await self._store.files.is_known(file_id):
                raise UnknownFileError(
                    f"the contents of file {shown(file_id)} are not in {self._store.files.contents.folder}; run "
                    "batches with the folder in which files are stored, on a file system that hosts share"
                ) from None
            message = f"input_file_id {shown(file_id)} was deleted or has expired before the batch was started"
            return [RowProblem(code="input_file_not_found", message=message, param="input_file_id")]

    async def _band(self, model: str) -> str:
        """Return the band for batches, or the queue's least urgent band if it has no such band."""
        bands = (await self._client.queue_policy(model)).bands
        return BATCH_BAND if BATCH_BAND in bands else bands[-1]

    async def _fail(self, problems: list[RowProblem]) -> None:
        errors = msgspec.json.encode(RowProblems(data=problems))
        status = await self._lease.write(BatchStatus.FAILED, {"errors": errors})
        if status is BatchStatus.CANCELLING:
            await self._lease.write(BatchStatus.CANCELLED, {"errors": errors})

    async def _feed(self, rows: Rows, inputs: InputRows, tally: Tally) -> bool:
        """Submit all rows that are not finished. Returns False if the slice ended first.

        Also returns True if the batch was cancelled or its window closed; then some rows are not finished.
        """
        pending = iter([number for number, is_done in enumerate(tally.is_done) if not is_done])
        path = journal_path(self._folder, self._lease.epoch, self._lease.holder)
        journal = await asyncio.to_thread(Journal, path)
        feed = asyncio.create_task(self._feed_all(rows, inputs, tally, pending, journal))
        try:
            await asyncio.wait(
                {feed, self._lease.interruption}, timeout=self._time_left_s(), return_when=asyncio.FIRST_COMPLETED
            )
            if feed.done():
                feed.result()
                return True
            return self._lease.interruption.done() and bool(self._lease.interruption.result())
        finally:
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)
            await journal.close()

    async def _feed_all(
        self, rows: Rows, inputs: InputRows, tally: Tally, pending: Iterator[int], journal: Journal
    ) -> None:
        async def feed() -> None:
            for number in pending:
                answered = await rows.answer(number, await asyncio.to_thread(inputs.read, number))
                if answered is not None:
                    await journal.append(answered)
                    tally.add(answered)
                    self._on_progress(tally)

        await all_or_none([feed() for _ in range(min(self._window, len(inputs)))])

    async def _cancel_rows(self, rows: Rows, inputs: InputRows, tally: Tally) -> None:
        """Cancel the requests of unfinished rows, submitted by this or an earlier runner."""
        left = [number for number, is_done in enumerate(tally.is_done) if not is_done]
        for start in range(0, len(left), _CANCEL_BATCH_SIZE):
            numbers = left[start : start + _CANCEL_BATCH_SIZE]
            input_rows: list[InputRow] = await asyncio.to_thread(
                lambda numbers=numbers: [inputs.read(number) for number in numbers]
            )
            await asyncio.gather(*map(rows.cancel, numbers, input_rows))

    async def _finish_batch(self, rows: Rows, inputs: InputRows, *, is_cancelled: bool) -> None:
        """Write the output files and end the batch, both or neither."""
        files, spec = self._store.files, self._spec
        names = {kind: _file_id(spec.id, self._lease.holder, kind) for kind in ("output", "error")}
        for file_id in names.values():
            await files.reserve(file_id)
        code = "batch_cancelled" if is_cancelled else "batch_expired"
        output = await in_long_thread(
            LongWork.BATCHES,
            write_output,
            self._folder,
            {kind: files.contents.path(file_id) for kind, file_id in names.items()},
            len(inputs),
            lambda number: rows.unfinished(number, inputs.read(number), code),
        )
        now = await files.time_s()
        records = output.records(spec, names, now)
        fields: Fields = {**output.fields, "unfinished": output.num_unfinished}
        fields |= {f"{kind}_file_id": record.file.id for kind, record in records.items()}
        ended = BatchStatus.EXPIRED if output.num_unfinished else BatchStatus.COMPLETED
        if is_cancelled:
            ended = BatchStatus.CANCELLED
        await self._lease.write(ended, fields, list(records.values()))
        log.info("batch_ended", batch=spec.id, status=str(ended), unfinished=output.num_unfinished)

    def _time_left_s(self) -> float | None:
        return None if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())


def _file_id(batch_id: str, holder: str, kind: str) -> str:
    """Return the id of an output file. It includes the holder, so that a runner without the lease writes to other
    files."""
    return f"file-{hashlib.sha256(f'{batch_id} {holder} {kind}'.encode()).hexdigest()[:32]}"
