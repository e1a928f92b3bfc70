"""``penstock top``: queues, engines and requests in a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ....shared.process.command_line import Command, UsageError, add_redis_arguments
from ....shared.redis_access.embedded import resolve_redis_url
from ...libraries import need_libraries


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="NAME", help="model whose tenants and requests are shown first")
    parser.add_argument("--read-only", action="store_true", help="change nothing")
    parser.add_argument("--show-contents", action="store_true", help="prompts and outputs, too")
    parser.add_argument("--log-file", type=Path, metavar="PATH", help="for warnings, which are dropped without it")
    add_redis_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    need_libraries("penstock top", "textual", extra="top")
    # Textual writes to standard error.
    if (
        not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
        or os.environ.get("TERM", "dumb") == "dumb"
    ):
        raise UsageError(
            "penstock top needs a terminal that can move its cursor; `penstock queue show MODEL --watch` prints lines"
        )
    from ....producer.control.secret_keys import Role
    from ...top.run import NO_LOG, run_top
    from ...views.access import Access

    role = Role.VIEWER if arguments.read_only else Role.ADMIN
    with resolve_redis_url(arguments.redis_url) as url:
        return run_top(
            url,
            namespace=arguments.namespace,
            shards=arguments.shards,
            access=Access("", role, arguments.show_contents),
            model=arguments.model,
            log_path=arguments.log_file or NO_LOG,
        )


COMMAND = Command("top", "Watch and change queues, engines and requests in this terminal.", _run, _add_arguments)
