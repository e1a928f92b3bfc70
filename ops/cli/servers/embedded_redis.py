"""``penstock redis``: the embedded Redis that commands without a URL use; users for your own Redis."""

from __future__ import annotations

import argparse

from ....shared.errors import ConfigurationError
from ....shared.process.command_line import EXIT_FAILED, Command, format_bytes
from ....shared.redis_access.embedded import ServerFolder, find_redis_cli, find_redis_server, read_status, stop
from . import redis_users


def _status(_: argparse.Namespace) -> int:
    folder = ServerFolder.prepare()
    status = read_status(folder)
    lines = {"url": folder.url, "data": folder.root, "log": folder.log}
    if status is None:
        lines = {"state": "not running", **lines, "program": find_redis_server()}
    else:
        lines = {
            "state": f"running, process {status.pid}, for {status.uptime_s} s",
            **lines,
            "version": status.version,
            "memory": format_bytes(status.used_memory_bytes),
            "keys": status.num_keys,
            "clients": status.num_clients,
        }
    for name, value in lines.items():
        print(f"{name + ':':<9}{value}")
    return 0 if status is not None else EXIT_FAILED


def _add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="even if a program uses it")


def _stop(arguments: argparse.Namespace) -> int:
    print("stopped; the data stay" if stop(ServerFolder.prepare(), force=arguments.force) else "not running")
    return 0


def _cli_path(_: argparse.Namespace) -> int:
    path = find_redis_cli()
    if path is None:
        raise ConfigurationError("redis-cli is not installed on this machine; install redis-tools")
    print(path)
    return 0


COMMAND = Command(
    "redis",
    "Show or stop the embedded Redis; create users for your own Redis.",
    subcommands=(
        Command("status", "Show whether it runs, where, and how large it is.", run=_status),
        Command("stop", "Stop it; the data stay.", run=_stop, add_arguments=_add_stop_arguments),
        Command("cli-path", "Print the path of a redis-cli, for: $(penstock redis cli-path) -s SOCKET", run=_cli_path),
        redis_users.COMMAND,
    ),
)
