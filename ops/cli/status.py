"""``penstock status``: the processes and queues of a deployment, and problems."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from ...producer.control.deployment import Deployment, read_deployment
from ...shared.connection import CommandConnection
from ...shared.deployment.presence import ProcessRecord
from ...shared.keys import Keys
from ...shared.process.command_line import EXIT_FAILED, Command, add_redis_arguments, format_table
from ..words import format_duration
from .command_parts import print_json, run_on_redis

_PROCESS_HEADER = ("KIND", "HOST", "PID", "VERSION", "SINCE", "OPTIONS", "LAST ERROR")
_MODEL_HEADER = ("MODEL", "ENGINES", "WAITING", "RUNNING", "OLDEST")
_MAX_ERROR_CHARS = 60


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object with every field")


async def _read_status(connection: CommandConnection, keys: Keys, _: argparse.Namespace) -> Deployment:
    return await read_deployment(connection, keys)


def _run_status(arguments: argparse.Namespace) -> int:
    overview = run_on_redis(_read_status, arguments)
    if arguments.json:
        print_json(overview)
    else:
        print(_describe_status(overview))
    return EXIT_FAILED if any(finding.is_error for finding in overview.findings) else 0


def _describe_status(overview: Deployment) -> str:
    parts = [
        f"{'ERROR' if finding.is_error else 'note'}: {finding.message}; {finding.remedy}"
        for finding in overview.findings
    ]
    if not parts:
        parts.append("nothing is missing")
    num_engines = Counter(engine.model for engine in overview.engines)
    if overview.queues:
        rows = [
            (
                stats.model,
                str(num_engines[stats.model] or "none"),
                str(stats.depth),
                str(stats.num_running),
                format_duration(stats.oldest_age_s),
            )
            for stats in overview.queues
        ]
        parts.append("\n" + format_table(_MODEL_HEADER, rows))
    if overview.processes:
        parts.append("\n" + format_table(_PROCESS_HEADER, [_process_row(process) for process in overview.processes]))
    return "\n".join(parts)


def _process_row(process: ProcessRecord) -> tuple[str, ...]:
    error = process.last_error
    if error:
        ago = format_duration(max(0.0, time.time() - process.last_error_at))
        error = f"{error[:_MAX_ERROR_CHARS]}, {ago} ago"
    return (
        process.kind,
        process.host,
        str(process.pid),
        process.package_version,
        format_duration(max(0.0, time.time() - process.started_at)),
        ", ".join(f"{name} {value}" for name, value in process.options.items()) or "-",
        error or "-",
    )


COMMAND = Command(
    "status",
    "Show what there is and what is missing; exit status 1 if requests or jobs stand still.",
    run=_run_status,
    add_arguments=_add_status_arguments,
)
