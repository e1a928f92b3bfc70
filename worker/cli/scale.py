"""``worker scale``: change the number of engines of a worker, here or on another host."""

from __future__ import annotations

import argparse
import asyncio

from ...shared.connection import checked_connection
from ...shared.deployment.audit import Audit, acting_as, process_actor
from ...shared.deployment.orders import scale_words, scale_worker
from ...shared.keys import Keys
from ...shared.process.command_line import Command, add_redis_arguments
from ...shared.redis_access.embedded import resolve_redis_url


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker_id", help="as shown by worker list")
    parser.add_argument("num_engines", type=int, help="number of engines; surplus ones drain before they exit")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="time until it does (300)")
    add_redis_arguments(parser)


def _run_scale(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url:
        asyncio.run(_scale(url, arguments))
    count = "1 engine" if arguments.num_engines == 1 else f"{arguments.num_engines} engines"
    print(f"{arguments.worker_id} serves with {count} until it exits; --engines sets the number at its start")
    return 0


async def _scale(url: str, arguments: argparse.Namespace) -> None:
    keys, worker_id, num_engines = Keys(arguments.namespace), arguments.worker_id, arguments.num_engines
    async with checked_connection(url, namespace=arguments.namespace) as connection:
        with acting_as(process_actor("cli")):
            async with Audit(connection, keys).audited("worker.scale", worker_id) as details:
                details["engines"] = await scale_words(connection.execute, keys, worker_id, num_engines)
                await scale_worker(connection.execute, keys, worker_id, num_engines, arguments.timeout)


COMMAND = Command("scale", "Serve with more engines or fewer.", run=_run_scale, add_arguments=_add_arguments)
