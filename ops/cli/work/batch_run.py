"""``penstock batch run``: a file of requests from the shell, begun and gone on with by the same command."""

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
# The command copies the answers; what it does not come to copy is gone after a day.
OUTPUT_TTL_S = 24 * 3600
HELD_PAUSE_S = 0.5
# Of a runner that was killed, the lease is over by then.
HELD_FOR_S = 30.0


class Begun(msgspec.Struct, frozen=True):
    """What stands beside the output until it is there: which batch it will be from, and of which input."""

    batch_id: str
    input_sha256: str


class _Run:
    """One start of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._input = Path(arguments.input)
        self._output = Path(arguments.output)
        self._errors = Path(arguments.errors) if arguments.errors else self._output.with_suffix(".errors.jsonl")
        self._mark = self._output.with_name(self._output.name + ".batch")
        self._endpoint = _endpoint_of(self._input)
        self._begun = self._begin()

    async def run(self, url: str) -> int:
        """Run the batch to its end, copy what came of it, and return the exit status."""
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

    def _begin(self) -> Begun:
        """Return what an earlier start began, or begin."""
        digest = _sha256(self._input)
        if self._mark.exists():
            begun = msgspec.json.decode(self._mark.read_bytes(), type=Begun)
            if begun.input_sha256 != digest:
                raise UsageError(
                    f"{self._mark} was begun with another {self._input}; put that back to go on, or delete "
                    f"{self._mark} to begin anew"
                )
            return begun
        for path in (self._output, self._errors):
            if path.exists():
                raise UsageError(f"{path} exists; move it away, or name another output")
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise UsageError(f"{path} cannot be written: {path.parent} is no folder that may be written to")
        begun = Begun(batch_id=f"batch_{secrets.token_hex(16)}", input_sha256=digest)
        part = self._mark.with_name(self._mark.name + ".part")
        part.write_bytes(msgspec.json.encode(begun))
        os.replace(part, self._mark)
        return begun

    async def _create(self, store: BatchStore) -> None:
        """Make the batch, if no earlier start came so far."""
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
        """Run it; after a runner that was killed, when its lease is over."""
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
        """Copy a file of the store to its place, whole or not at all; an empty one only if ``always``."""
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
        """The input is wrong: say where; when it was mended, it is another file and begins anew."""
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
    """Return the url of the first row, which has to be that of all.

    Raises:
        ValidationError: the file cannot be read, or begins with no such row.
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
            f"the first line is none ({error})"
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _told_when_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
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
    parser.add_argument("--files-dir", metavar="DIR", help="where rows that are done are kept until the end")
    parser.add_argument(
        "--lease-ttl", type=float, default=LEASE_TTL_S, metavar="S", help="how long a death holds up the next start (5)"
    )
    add_redis_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url, _told_when_interrupted():
        return asyncio.run(_Run(arguments).run(url))


RUN = Command("run", "Run a file of requests; after any end, the same command goes on.", _run, _add_arguments)
