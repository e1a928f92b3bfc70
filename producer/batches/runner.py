"""The run of a batch, from wherever it stands to its end.

Invariant: whatever is killed, or stopped and woken up, and however many runners there are, each ``custom_id`` has one
line in the files of the ended batch.

- A row is a detached request whose id follows from batch and row: asked for twice, it is one request with one answer.
- A row counts once its answer is in the journal, on the disk; what is not there is asked for again.
- The final files are made from the journal in one pass that takes each row once, under names of this holder's own.
- One script, refused to all but the holder of the lease, ends the batch and makes these files known. Others never are.

So nothing in Redis and no file is written twice to any effect, and no step needs to know which one died before.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator

import msgspec

from ...shared.errors import BatchTakenOverError, UnknownFileError, UnknownModelError, ValidationError
from ...shared.log import get_logger
from ...shared.shown import shown
from ..client import Client
from ..long_work import LongWork, in_long_thread
from ..openai.parsers import ParserChoice
from .answers import Rows
from .batch_records import Batch, BatchStatus, RowProblem, RowProblems
from .batch_store import BatchStore
from .gathering import all_or_none
from .input_rows import InputRow, InputRows, check_linked
from .journal import Journal, Tally, journal_path, tally
from .lease import Fields, Lease
from .output import write_output

# Rows under way at a time: enough to fill an engine's batch, little for the queue to hold.
DEFAULT_WINDOW = 128
MAX_WINDOW = 10_000
BATCH_BAND = "batch"
# Results that wait in Redis for a runner that died; what takes longer to come back computes its window again.
ROW_RESULT_TTL_S = 900.0
_CANCEL_AT_ONCE = 256

PARSERS_OF_THE_MODEL = ParserChoice()

OnProgress = Callable[[Tally], None]

log = get_logger(__name__)


async def run_batch(
    client: Client,
    store: BatchStore,
    batch_id: str,
    *,
    window: int = DEFAULT_WINDOW,
    slice_s: float | None = None,
    parsers: ParserChoice = PARSERS_OF_THE_MODEL,
    on_progress: OnProgress = lambda _: None,
) -> Batch:
    """Run a batch from where it stands to its end, or for a slice of time; returns it as it stands then.

    Any process may call this for any open batch: the lease lets one at a time. Whatever ends this call, what is done is
    kept, and the next one goes on. Requests under way run on, and the next run attaches to them.

    Args:
        client: asks for the rows; its ``result_ttl_s`` is how long an answer waits for a runner (ROW_RESULT_TTL_S is
            enough), its ``tenant`` does not matter.
        window: most rows under way.
        slice_s: stop after so long, with the batch still open; None runs to the end.
        parsers: what reads tool calls and reasoning in answers to chats; by default what the model's card says.
        on_progress: called after each row.

    Raises:
        ValidationError: ``window`` is out of range.
        UnknownBatchError: there is none of that id.
        BatchEndedError: it has ended, and that was told.
        BatchHeldError: another runner has it; BatchTakenOverError: it took it over meanwhile.
        UnknownFileError: this process's folder does not hold the input.
        RedisUnavailableError: Redis was away for longer than client or store wait for it.
        OSError: the folder cannot be read or written.
    """
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_WINDOW:
        raise ValidationError(f"window must be 1 to {MAX_WINDOW}, got {shown(window)}")
    async with await store.take(batch_id) as lease:
        log.info("batch_started", batch=batch_id, epoch=lease.epoch)
        record = await store.record(batch_id)
        if not record.batch.status.is_end:
            await _Run(client, store, lease, parsers, window, slice_s, on_progress).run(record.batch)
            record = await store.record(batch_id)
        if record.batch.status.is_end:
            await store.tell_end(record)
            if not await lease.close():
                raise BatchTakenOverError(
                    f"batch {shown(batch_id)} was taken over by another runner, which tells its end"
                )
        return record.batch


class _Run:
    """One runner's part of a batch."""

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
        """Take the batch as far as it goes."""
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
        card = await self._client.get_model_config(inputs.model)  # by the name of an adapter, that of its base
        rows = Rows(self._client, self._spec, band, self._parsers.for_model(card))
        status = batch.status
        if status is BatchStatus.VALIDATING:
            fields: Fields = {"total": len(inputs), "model": inputs.model}
            status = await self._lease.write(BatchStatus.IN_PROGRESS, fields)
        done = await in_long_thread(LongWork.BATCHES, tally, self._folder, len(inputs))
        self._lease.counts = lambda: {"completed": done.completed, "failed": done.failed}
        self._on_progress(done)
        if status is BatchStatus.IN_PROGRESS:
            if not await self._feed(rows, inputs, done):
                return
            # Cancelled since: the write is not done, and says so.
            status = await self._lease.write(BatchStatus.FINALIZING, self._lease.counts())
        is_cancelled = status is BatchStatus.CANCELLING
        if 0 in done.is_done:
            await self._cancel_rows(rows, inputs, done)
        await self._finish(rows, inputs, is_cancelled=is_cancelled)

    async def _checked_input(self) -> InputRows | list[RowProblem]:
        """Return the rows. The input is linked to the working folder first, so that its file may be deleted."""
        await self._store.files.contents.prepare()
        source = self._store.files.contents.path(self._spec.input_file_id)
        try:
            return await in_long_thread(LongWork.BATCHES, check_linked, source, self._folder, self._spec.endpoint)
        except FileNotFoundError:
            file_id = self._spec.input_file_id
            if await self._store.files.is_known(file_id):
                raise UnknownFileError(
                    f"the contents of file {shown(file_id)} are not in {self._store.files.contents.folder}; whoever "
                    "runs batches needs the folder in which files are stored, by a file system that hosts share"
                ) from None
            message = f"input_file_id {shown(file_id)} was deleted, or has expired, before the batch was begun"
            return [RowProblem(code="input_file_not_found", message=message, param="input_file_id")]

    async def _band(self, model: str) -> str:
        """Return the band for batches; if the queue has been given other bands, its least urgent."""
        bands = (await self._client.queue_policy(model)).bands
        return BATCH_BAND if BATCH_BAND in bands else bands[-1]

    async def _fail(self, problems: list[RowProblem]) -> None:
        errors = msgspec.json.encode(RowProblems(data=problems))
        status = await self._lease.write(BatchStatus.FAILED, {"errors": errors})
        if status is BatchStatus.CANCELLING:
            await self._lease.write(BatchStatus.CANCELLED, {"errors": errors})

    async def _feed(self, rows: Rows, inputs: InputRows, done: Tally) -> bool:
        """Ask for all rows that are not done; False if the slice was over first.

        True as well when the batch was cancelled, or its window closed: it has rows that are not done, then.
        """
        pending = iter([number for number, is_done in enumerate(done.is_done) if not is_done])
        path = journal_path(self._folder, self._lease.epoch, self._lease.holder)
        journal = await asyncio.to_thread(Journal, path)
        feeding = asyncio.create_task(self._feed_all(rows, inputs, done, pending, journal))
        try:
            await asyncio.wait(
                {feeding, self._lease.interruption}, timeout=self._time_left_s(), return_when=asyncio.FIRST_COMPLETED
            )
            if feeding.done():
                feeding.result()
                return True
            return self._lease.interruption.done() and bool(self._lease.interruption.result())
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
            await journal.close()

    async def _feed_all(
        self, rows: Rows, inputs: InputRows, done: Tally, pending: Iterator[int], journal: Journal
    ) -> None:
        async def feed() -> None:
            for number in pending:
                answered = await rows.answer(number, await asyncio.to_thread(inputs.read, number))
                if answered is not None:
                    await journal.append(answered)
                    done.add(answered)
                    self._on_progress(done)

        await all_or_none([feed() for _ in range(min(self._window, len(inputs)))])

    async def _cancel_rows(self, rows: Rows, inputs: InputRows, done: Tally) -> None:
        """End what this runner or one before it has under way."""
        left = [number for number, is_done in enumerate(done.is_done) if not is_done]
        for start in range(0, len(left), _CANCEL_AT_ONCE):
            part = left[start : start + _CANCEL_AT_ONCE]
            read: list[InputRow] = await asyncio.to_thread(lambda part=part: [inputs.read(number) for number in part])
            await asyncio.gather(*map(rows.cancel, part, read))

    async def _finish(self, rows: Rows, inputs: InputRows, *, is_cancelled: bool) -> None:
        """Make the final files and end the batch, both or neither."""
        files, spec = self._store.files, self._spec
        names = {kind: _file_id(spec.id, self._lease.holder, kind) for kind in ("output", "error")}
        for file_id in names.values():
            await files.reserve(file_id)
        code = "batch_cancelled" if is_cancelled else "batch_expired"
        written = await in_long_thread(
            LongWork.BATCHES,
            write_output,
            self._folder,
            {kind: files.contents.path(file_id) for kind, file_id in names.items()},
            len(inputs),
            lambda number: rows.unfinished(number, inputs.read(number), code),
        )
        now = await files.time_s()
        records = written.records(spec, names, now)
        fields: Fields = dict(written.fields)
        fields |= {f"{kind}_file_id": record.file.id for kind, record in records.items()}
        ended = BatchStatus.EXPIRED if written.num_unfinished else BatchStatus.COMPLETED
        if is_cancelled:
            ended = BatchStatus.CANCELLED
        await self._lease.write(ended, fields, list(records.values()))
        log.info("batch_ended", batch=spec.id, status=str(ended), unfinished=written.num_unfinished)

    def _time_left_s(self) -> float | None:
        return None if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())


def _file_id(batch_id: str, holder: str, kind: str) -> str:
    """Return the id of a final file, of this holder alone: what a runner that lost its lease writes has another."""
    return f"file-{hashlib.sha256(f'{batch_id} {holder} {kind}'.encode()).hexdigest()[:32]}"
