"""``penstock batch run``: runs a file of requests from the shell. The same command resumes an interrupted run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Iterator
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
from ....shared.process.command_line import EXIT_FAILED, Command, UsageError, add_redis_arguments
from ....shared.redis_access.embedded import resolve_redis_url
from .batch_progress import row_bar

COMPLETION_WINDOW = "7d"
# The command copies the answers. Answers that are not copied expire after a day.
OUTPUT_TTL_S = 24 * 3600
HELD_PAUSE_S = 0.5
# By then the lease of a killed runner has expired.
HELD_FOR_S = 30.0


class StartedRun(msgspec.Struct, frozen=True):
    """File next to the future output: the batch that will produce it, and a digest of its input."""

    batch_id: str
    input_sha256: str


class _Run:
    """An invocation of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._input = Path(arguments.input)
        self._output = Path(arguments.output)
        self._errors = Path(arguments.errors) if arguments.errors else self._output.with_suffix(".errors.jsonl")
        self._mark = self._output.with_name(self._output.name + ".batch")
        self._endpoint = _endpoint_of(self._input)
        self._begun = self._begin()

    async def run(self, url: str) -> int:
        """Run the batch to its end, copy its results, and return the exit status."""
        arguments = self._arguments
        retrying: dict[str, float] = {"retry_for_s": float("inf")}
        folder, namespace = arguments.files_dir, arguments.namespace
        async with (
            BatchStore(url, folder, namespace=namespace, lease_ttl_s=arguments.lease_ttl, **retrying) as store,
            Client.connect(
                url, namespace=namespace, shards=arguments.shards, result_ttl_s=ROW_RESULT_TTL_S, **retrying
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

    def _begin(self) -> StartedRun:
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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


def _run(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url, _told_when_interrupted():
        return asyncio.run(_Run(arguments).run(url))


RUN = Command("run", "Run a file of requests; the same command resumes an interrupted run.", _run, _add_arguments)
