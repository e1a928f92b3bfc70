"""``penstock batch``: files of requests, from the shell or through the gateway."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable

from ....producer.batches import Batch, BatchStatus, BatchStore
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ....shared.redis_access.embedded import resolve_redis_url
from ...words import format_sheet, format_time
from ..broker_command import print_json
from .batch_run import RUN

_HEADER = ("BATCH", "STATUS", "MADE", "DONE", "FAILED", "ROWS", "MODEL")
Work = Callable[[BatchStore, argparse.Namespace], Awaitable[None]]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="default", help="whose batches")
    add_redis_arguments(parser)


def _add_id_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", metavar="ID")
    _add_arguments(parser)


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    _add_id_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object, as OpenAI's API shows it")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.add_argument("--after", metavar="ID", help="only batches created before this one")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="maximum number, up to 100 (20)")
    parser.add_argument("--json", action="store_true", help="one array, as OpenAI's API shows them")


async def _list(store: BatchStore, arguments: argparse.Namespace) -> None:
    page = await store.list(tenant=arguments.tenant, after=arguments.after, limit=arguments.limit)
    if arguments.json:
        print_json(page.data)
    elif page.data:
        print(format_table(_HEADER, [_row(batch) for batch in page.data]))
        if page.has_more:
            print(f"there are more: --after {page.last_id}")
    else:
        print("there are none")


async def _show(store: BatchStore, arguments: argparse.Namespace) -> None:
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


async def _cancel(store: BatchStore, arguments: argparse.Namespace) -> None:
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


def _row(batch: Batch) -> tuple[str, ...]:
    counts = batch.request_counts
    numbers = map(str, (counts.completed, counts.failed, counts.total))
    return (batch.id, str(batch.status), format_time(batch.created_at), *numbers, batch.model or "-")


COMMAND = Command(
    "batch",
    "Run files of requests, and list batches.",
    subcommands=(
        RUN,
        Command("list", "List the batches of a tenant, newest first.", _runner(_list), _add_list_arguments),
        Command("show", "Show one batch.", _runner(_show), _add_show_arguments),
        Command("cancel", "End a batch; finished rows keep their results.", _runner(_cancel), _add_id_arguments),
    ),
)
