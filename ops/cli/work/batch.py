"""``penstock batch``: files of requests, from the shell or through the gateway.

A run that was interrupted is resumed by the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from ....producer import Client
from ....producer.batches import (
    DEFAULT_WINDOW,
    LEASE_TTL_S,
    ROW_RESULT_TTL_S,
    Batch,
    BatchStatus,
    BatchStore,
    OnProgress,
    Tally,
    read_local,
    run_batch,
)
from ....shared.errors import (
    BatchEndedError,
    BatchHeldError,
    BatchTakenOverError,
    UnknownBatchError,
    UnknownFileError,
    ValidationError,
)
from ....shared.process.command_line import EXIT_FAILED, Command, UsageError, add_redis_arguments, format_table
from ....shared.redis_access.embedded import resolve_redis_url
from ....shared.values.distribution import install_command
from ...words import format_sheet, format_time
from ..command_parts import print_json

COMPLETION_WINDOW = "7d"
# The command copies the answers. Answers that are not copied expire after a day.
OUTPUT_TTL_S = 24 * 3600
HELD_PAUSE_S = 0.5
# By then the lease of a killed runner has expired.
HELD_FOR_S = 30.0
_HEADER = ("BATCH", "STATUS", "MADE", "DONE", "FAILED", "ROWS", "MODEL")
Work = Callable[[BatchStore, argparse.Namespace], Awaitable[None]]


class StartedRun(msgspec.Struct, frozen=True):
    """File next to the future output: the batch that will produce it, and a digest of its input."""

    batch_id: str
    input_sha256: str


class _BatchFileRun:
    """An invocation of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._input = Path(arguments.input)
        self._output = Path(arguments.output)
        self._errors = Path(arguments.errors) if arguments.errors else self._output.with_suffix(".errors.jsonl")
        self._mark = self._output.with_name(self._output.name + ".batch")
        self._endpoint = _endpoint_of(self._input)
        self._begun = self._begin_or_resume()

    async def run(self, url: str) -> int:
        """Run the batch to its end, copy its results, and return the exit status."""
        arguments = self._arguments
        retry_for_s = float("inf")
        folder, namespace = arguments.files_dir, arguments.namespace
        async with (
            BatchStore(
                url, folder, namespace=namespace, lease_ttl_s=arguments.lease_ttl, retry_for_s=retry_for_s
            ) as store,
            Client.connect(
                url,
                namespace=namespace,
                shards=arguments.shards,
                result_ttl_s=ROW_RESULT_TTL_S,
                retry_for_s=retry_for_s,
            ) as client,
        ):
            await self._create(store)
            with row_bar() as on_progress:
                batch = await self._run_to_end(client, store, on_progress)
            if batch.status is BatchStatus.FAILED:
                return await self._refused(batch)
            await self._copy(store, batch.output_file_id, self._output, always=True)
            await self._copy(store, batch.error_file_id, self._errors)
            await asyncio.to_thread(self._mark.unlink)
            for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    with contextlib.suppress(UnknownFileError):
                        await store.files.delete(file_id, tenant=arguments.tenant)
        return self._report(batch)

    def _begin_or_resume(self) -> StartedRun:
        """Return the run that an earlier invocation started, or start one."""
        digest = _sha256(self._input)
        if self._mark.exists():
            begun = msgspec.json.decode(self._mark.read_bytes(), type=StartedRun)
            if begun.input_sha256 != digest:
                raise UsageError(
                    f"{self._mark} was started with another {self._input}; restore that to resume, or delete "
                    f"{self._mark} to start again"
                )
            return begun
        for path in (self._output, self._errors):
            if path.exists():
                raise UsageError(f"{path} exists; move it away, or name another output")
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise UsageError(f"{path} cannot be written: {path.parent} is not a writable folder")
        begun = StartedRun(batch_id=f"batch_{secrets.token_hex(16)}", input_sha256=digest)
        part = self._mark.with_name(self._mark.name + ".part")
        part.write_bytes(msgspec.json.encode(begun))
        os.replace(part, self._mark)
        return begun

    async def _create(self, store: BatchStore) -> None:
        """Create the batch, if no earlier invocation has."""
        tenant = self._arguments.tenant
        try:
            await store.get(self._begun.batch_id, tenant=tenant)
        except UnknownBatchError:
            file = await store.files.create(read_local(self._input), filename=self._input.name, tenant=tenant)
            await store.create(
                input_file_id=file.id,
                endpoint=self._endpoint,
                tenant=tenant,
                completion_window=COMPLETION_WINDOW,
                output_expires_after_s=OUTPUT_TTL_S,
                batch_id=self._begun.batch_id,
                is_private=True,
            )

    async def _run_to_end(self, client: Client, store: BatchStore, on_progress: OnProgress) -> Batch:
        """Run the batch, after the lease of a killed runner has expired."""
        batch_id, window = self._begun.batch_id, self._arguments.concurrency
        give_up_at = asyncio.get_running_loop().time() + HELD_FOR_S
        while True:
            try:
                return await run_batch(client, store, batch_id, window=window, on_progress=on_progress)
            except BatchEndedError:
                return await store.get(batch_id, tenant=self._arguments.tenant)
            except BatchTakenOverError:
                raise
            except BatchHeldError:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                await asyncio.sleep(HELD_PAUSE_S)

    async def _copy(self, store: BatchStore, file_id: str | None, path: Path, *, always: bool = False) -> None:
        """Copy a file of the store to ``path`` atomically; an empty one only if ``always``."""
        if file_id is None and not always:
            return
        part = path.with_name(path.name + ".part")
        file = await asyncio.to_thread(part.open, "wb")
        try:
            if file_id is not None:
                async for chunk in store.files.content(file_id, tenant=self._arguments.tenant):
                    await asyncio.to_thread(file.write, chunk)
        finally:
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(os.replace, part, path)

    async def _refused(self, batch: Batch) -> int:
        """Report the errors of the input. A corrected file has another digest, so it starts a new batch."""
        for problem in batch.errors.data if batch.errors is not None else []:
            place = f"{self._input}:{problem.line}" if problem.line is not None else self._input
            print(f"{place}: {problem.message} ({problem.code})", file=sys.stderr)
        await asyncio.to_thread(self._mark.unlink)
        return EXIT_FAILED

    def _report(self, batch: Batch) -> int:
        counts = batch.request_counts
        print(f"{batch.status}: {counts.completed} of {counts.total} rows are in {self._output}")
        if counts.failed:
            print(f"{counts.failed} rows failed or were not run; {self._errors} says why", file=sys.stderr)
        return EXIT_FAILED if counts.failed or batch.status is not BatchStatus.COMPLETED else 0


def _endpoint_of(path: Path) -> str:
    """Return the url of the first row, which must be that of all rows.

    Raises:
        ValidationError: the file cannot be read, or its first line is not a valid row.
    """
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        return msgspec.json.decode(first, type=dict[str, object])["url"]  # type: ignore[return-value]  # create() checks
    except OSError as error:
        raise ValidationError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise ValidationError(
            f"{path} must have a row in each line, as in "
            '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": …}}; '
            f"the first line is not a row ({error})"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _told_when_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume", file=sys.stderr)
        raise


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="a request per line: custom_id, method, url, body")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.jsonl", help="answers, in the order of their ends"
    )
    parser.add_argument("--errors", metavar="PATH", help="rows that failed (OUT.errors.jsonl)")
    parser.add_argument(
        "--concurrency", type=int, default=DEFAULT_WINDOW, metavar="N", help="rows at a time (%(default)s)"
    )
    parser.add_argument("--tenant", default="default", help="on whose account")
    parser.add_argument("--files-dir", metavar="DIR", help="folder for finished rows until the end")
    parser.add_argument(
        "--lease-ttl", type=float, default=LEASE_TTL_S, metavar="S", help="how long a death holds up the next start (5)"
    )
    add_redis_arguments(parser)


def _run_batch_file(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url, _told_when_interrupted():
        return asyncio.run(_BatchFileRun(arguments).run(url))


RUN = Command(
    "run", "Run a file of requests; the same command resumes an interrupted run.", _run_batch_file, _add_run_arguments
)


@contextlib.contextmanager
def row_bar() -> Iterator[OnProgress]:
    """Draw a progress bar on standard error, if that is a terminal. Yields a function to call after each row."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Imported here, because only this command needs rich, and not every installation has it.
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        sys.stderr.write(f"for a progress bar: {install_command('cli')}\n")
        yield lambda _: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("rows", total=None, note="")

        def draw(tally: Tally) -> None:
            note = f"{tally.failed} failed" if tally.failed else ""
            total = len(tally.is_done)
            progress.update(bar, total=total, completed=tally.completed + tally.failed, note=note)

        yield draw


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="default", help="whose batches")
    add_redis_arguments(parser)


def _add_id_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", metavar="ID")
    _add_batch_arguments(parser)


def _add_batch_show_arguments(parser: argparse.ArgumentParser) -> None:
    _add_id_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object, as OpenAI's API shows it")


def _add_batch_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_batch_arguments(parser)
    parser.add_argument("--after", metavar="ID", help="only batches created before this one")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="maximum number, up to 100 (20)")
    parser.add_argument("--json", action="store_true", help="one array, as OpenAI's API shows them")


async def _list_batches(store: BatchStore, arguments: argparse.Namespace) -> None:
    page = await store.list(tenant=arguments.tenant, after=arguments.after, limit=arguments.limit)
    if arguments.json:
        print_json(page.data)
    elif page.data:
        print(format_table(_HEADER, [_batch_row(batch) for batch in page.data]))
        if page.has_more:
            print(f"there are more: --after {page.last_id}")
    else:
        print("there are none")


async def _show_batch(store: BatchStore, arguments: argparse.Namespace) -> None:
    batch = await store.get(arguments.batch_id, tenant=arguments.tenant)
    if arguments.json:
        print_json(batch)
        return
    counts = batch.request_counts
    lines = {
        "batch": batch.id,
        "status": str(batch.status),
        "rows": f"{counts.completed} answered and {counts.failed} failed of {counts.total}",
        "endpoint": batch.endpoint,
        "model": batch.model or "-",
        "made": format_time(batch.created_at),
    }
    for status in BatchStatus:
        at = getattr(batch, f"{status}_at", None)
        if at is not None:
            lines[status] = format_time(at)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        lines[name.removesuffix("_file_id")] = getattr(batch, name) or "-"
    print(format_sheet(lines))
    for problem in batch.errors.data if batch.errors is not None else []:
        place = "" if problem.line is None else f"line {problem.line}: "
        print(f"{place}{problem.message} ({problem.code})")


async def _cancel_batch(store: BatchStore, arguments: argparse.Namespace) -> None:
    batch = await store.cancel(arguments.batch_id, tenant=arguments.tenant)
    print(f"{batch.id} is {batch.status}; what is done is kept")


def _runner(work: Work) -> Callable[[argparse.Namespace], int]:
    async def on_store(url: str, arguments: argparse.Namespace) -> None:
        async with BatchStore(url, namespace=arguments.namespace) as store:
            await work(store, arguments)

    def run(arguments: argparse.Namespace) -> int:
        with resolve_redis_url(arguments.redis_url) as url:
            asyncio.run(on_store(url, arguments))
        return 0

    return run


def _batch_row(batch: Batch) -> tuple[str, ...]:
    counts = batch.request_counts
    numbers = map(str, (counts.completed, counts.failed, counts.total))
    return (batch.id, str(batch.status), format_time(batch.created_at), *numbers, batch.model or "-")


COMMAND = Command(
    "batch",
    "Run files of requests, and list batches.",
    subcommands=(
        RUN,
        Command(
            "list", "List the batches of a tenant, newest first.", _runner(_list_batches), _add_batch_list_arguments
        ),
        Command("show", "Show one batch.", _runner(_show_batch), _add_batch_show_arguments),
        Command("cancel", "End a batch; finished rows keep their results.", _runner(_cancel_batch), _add_id_arguments),
    ),
)
