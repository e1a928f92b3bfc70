"""``penstock dashboard`` and ``penstock top``: queues, engines and requests, in a browser and in a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ....shared.process.command_line import Command, UsageError, add_redis_arguments, print_if_read
from ....shared.process.log import add_log_arguments, configure_logging
from ....shared.redis_access.embedded import resolve_redis_url
from ..command_parts import add_prices_argument, chosen_prices, need_libraries

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8090
_NEEDED = ("starlette", "uvicorn", "jinja2", "itsdangerous")


def _add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default=DEFAULT_HOST, help="others need --keys on or --auth-header (127.0.0.1)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (8090)")
    parser.add_argument(
        "--keys", choices=("on", "off"), default="off", help="require a login with a key of `penstock operator`"
    )
    parser.add_argument(
        "--auth-header", metavar="NAME", help="header with the user's name from a proxy, as X-Forwarded-User"
    )
    parser.add_argument(
        "--groups-header",
        default="X-Forwarded-Groups",
        metavar="NAME",
        help="header with the user's groups (X-Forwarded-Groups)",
    )
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="role of a user or group of the proxy: viewer, operator, admin; +contents shows prompts and outputs",
    )
    parser.add_argument(
        "--default-role",
        choices=("none", "viewer", "operator", "admin"),
        default="viewer",
        help="role of users of the proxy that no --role names; none refuses them (viewer)",
    )
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="CIDR",
        help="network whose headers are trusted; may be repeated (this machine)",
    )
    parser.add_argument(
        "--show-contents", action="store_true", help="show prompts and outputs when no authentication is used"
    )
    add_prices_argument(parser, "for the costs of the page Usage; read at the start")
    add_log_arguments(parser)
    add_redis_arguments(parser)


def _run_dashboard(arguments: argparse.Namespace) -> int:
    need_libraries("the dashboard", *_NEEDED, extra="dashboard")
    if arguments.keys == "on" and arguments.auth_header:
        raise UsageError("--keys on and --auth-header exclude each other; pass only one")
    from ...dashboard import Access, HeaderAccess, Role, everybody
    from ...dashboard.access import LOOPBACK, parse_networks, parse_roles
    from ...dashboard.serve import serve

    configure_logging(arguments.log_level, arguments.log_format)
    if arguments.keys == "on":
        access = None
    elif arguments.auth_header:
        access = HeaderAccess(
            arguments.auth_header,
            arguments.groups_header,
            parse_roles(arguments.role),
            None if arguments.default_role == "none" else Role(arguments.default_role),
            parse_networks(arguments.trusted_proxy or LOOPBACK),
        )
    else:
        access = everybody(Access("local", Role.ADMIN, sees_contents=arguments.show_contents))
    is_open = access is not None and not arguments.auth_header
    if is_open:
        print_if_read("no authentication: every user of this machine may do everything")
    with resolve_redis_url(arguments.redis_url) as url:
        return serve(
            url,
            host=arguments.host,
            port=arguments.port,
            namespace=arguments.namespace,
            shards=arguments.shards,
            access=access,
            is_open=is_open,
            prices=chosen_prices(arguments),
        )


DASHBOARD = Command(
    "dashboard", "Serve the operators' pages.", run=_run_dashboard, add_arguments=_add_dashboard_arguments
)


def _add_top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="NAME", help="model whose tenants and requests are shown first")
    parser.add_argument("--read-only", action="store_true", help="change nothing")
    parser.add_argument("--show-contents", action="store_true", help="prompts and outputs, too")
    parser.add_argument("--log-file", type=Path, metavar="PATH", help="for warnings, which are dropped without it")
    add_redis_arguments(parser)


def _run_top(arguments: argparse.Namespace) -> int:
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


TOP = Command("top", "Watch and change queues, engines and requests in this terminal.", _run_top, _add_top_arguments)
