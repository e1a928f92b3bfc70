"""``penstock redis``: the embedded Redis that commands without a URL use, and users for your own Redis.

The file of users is an ACL file for a Redis; another has the URL of each of them.
"""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from ....shared.errors import ConfigurationError
from ....shared.process.command_line import EXIT_FAILED, NAMESPACE_HELP, NAMESPACE_VARIABLE, Command, UsageError
from ....shared.redis_access.embedded import ServerFolder, find_redis_cli, find_redis_server, read_status, stop
from ....shared.redis_access.rights import RedisVersion, Role, user_line
from ....shared.redis_access.url import parse_pool
from ....shared.values.names import DEFAULT_NAMESPACE
from ....shared.values.shown import format_bytes, shown

ACL_FILE = "users.acl"
# Disables the default user, so every login needs a name.
_NO_DEFAULT = "user default off"
_USED_BY = {
    Role.CLIENT: "apps",
    Role.WORKER: "worker start",
    Role.GATEWAY: "penstock gateway",
    Role.JOBS: "penstock jobs",
    Role.OPERATOR: "penstock dashboard, penstock metrics and the other commands",
}


def _add_users_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="where the files go: users.acl, and ROLE.url for each role")
    parser.add_argument(
        "--address", default="localhost:6379", metavar="HOST[:PORT]", help="of that Redis (localhost:6379)"
    )
    parser.add_argument(
        "--redis-version",
        choices=[version.value for version in RedisVersion],
        default=RedisVersion.V7.value,
        help="version of that Redis: 7 or newer, or Valkey (7); or 6.2, whose users may change more",
    )
    parser.add_argument("--ca", metavar="FILE", help="speak TLS; the authority that signed its certificate")
    parser.add_argument(
        "--namespace",
        default=os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE,
        help=f"{NAMESPACE_HELP} (default: {NAMESPACE_VARIABLE}, else {DEFAULT_NAMESPACE})",
    )


def _run_users(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    passwords = {role: secrets.token_urlsafe(32) for role in Role}
    version = RedisVersion(arguments.redis_version)
    lines = [_NO_DEFAULT, *(user_line(role, arguments.namespace, word, version) for role, word in passwords.items())]
    contents = {f"{role}.url": _user_url(arguments, role, word) for role, word in passwords.items()}
    contents[ACL_FILE] = "\n".join(lines)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        existing = [name for name in contents if (folder / name).exists()]
        if existing:
            raise UsageError(f"{folder} has {', '.join(existing)} already; name another folder, or remove them")
        for name, content in contents.items():
            _write_new_file(folder / name, content)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename} cannot be written: {error.strerror}; name another folder"
        ) from error
    newer = " or newer, or Valkey" if version is RedisVersion.V7 else ""
    print(f"{folder / ACL_FILE}: give it to redis-server {version}{newer} as aclfile")
    for role in Role:
        print(f"{folder / f'{role}.url'}: PENSTOCK_REDIS_URL_FILE of {_USED_BY[role]}")
    return 0


def _user_url(arguments: argparse.Namespace, role: Role, password: str) -> str:
    scheme, query = ("rediss", f"?ssl_ca_certs={arguments.ca}") if arguments.ca else ("redis", "")
    if "/" in arguments.address or "@" in arguments.address:
        raise UsageError(f"--address must be HOST or HOST:PORT, got {shown(arguments.address)}")
    url = f"{scheme}://{role}:{password}@{arguments.address}{query}"
    parse_pool(url)
    return url


def _write_new_file(path: Path, content: str) -> None:
    """Write a file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content + "\n")


USERS = Command(
    "users",
    "Create users for a Redis, each with the rights of its role.",
    run=_run_users,
    add_arguments=_add_users_arguments,
)


def _embedded_status(_: argparse.Namespace) -> int:
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


def _stop_embedded(arguments: argparse.Namespace) -> int:
    print("stopped; the data stay" if stop(ServerFolder.prepare(), force=arguments.force) else "not running")
    return 0


def _cli_path(_: argparse.Namespace) -> int:
    path = find_redis_cli()
    if path is None:
        raise ConfigurationError("redis-cli is not installed on this machine; install redis-tools")
    print(path)
    return 0


REDIS = Command(
    "redis",
    "Show or stop the embedded Redis; create users for your own Redis.",
    subcommands=(
        Command("status", "Show whether it runs, where, and how large it is.", run=_embedded_status),
        Command("stop", "Stop it; the data stay.", run=_stop_embedded, add_arguments=_add_stop_arguments),
        Command("cli-path", "Print the path of a redis-cli, for: $(penstock redis cli-path) -s SOCKET", run=_cli_path),
        USERS,
    ),
)
