"""One connection to Redis: how it is opened, when it counts as lost, what it sends, and the log of an outage.

Managed servers accept commands of 3,999 arguments at most, so longer ones are split. A large message takes time on a
slow link, so a connection that still sends is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import RedisFullError, RedisUnavailableError
from ..process.log import get_logger
from ..values.shown import mask_url
from .url import parse_pool

try:
    from hiredis import pack_command as hiredis_pack
except ImportError:
    hiredis_pack = None
CONNECT_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.05
# Pause after a refused password: only an administrator can change that, and a server may ban frequent attempts.
LOGIN_PAUSE_S = 1.0
# Memory is freed by expiries or an administrator, so frequent attempts would not help.
FULL_PAUSE_S = 0.25
# For who is told that Redis is full.
FULL_RETRY_AFTER_S = 1.0
WARN_EVERY_S = 5.0
# Begins the mark of a shard to which a model's keys are on their way.
MOVING = "*"
LOST = (RedisConnectionError, RedisTimeoutError, OSError, asyncio.IncompleteReadError)
# Redis 6.2 hides the code of a command's refusal inside that of the script which called it.
_NOT_NOW = re.compile(r"(?:^|: -)(?:LOADING|BUSY|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|MISCONF|NOREPLICAS)(?: |$)")
_READ_ONLY = re.compile(r"(?:^|: -)READONLY(?: |$)")
_FULL = re.compile(r"(?:^|: -)OOM(?: |$)")
T = TypeVar("T")
log = get_logger(__name__)
# With room for the command itself, a script's hash and keys, and what belongs to all parts.
MAX_ARGUMENTS = 3_900
try:
    import fcntl
    import termios
except ImportError:  # where there are none, what the system has still to send is not seen
    fcntl = termios = None


def pack_command(connection: AbstractConnection, args: tuple[Any, ...]) -> list[bytes]:
    """Return a command as bytes to send; hiredis does it ten times as fast as redis-py, where it is installed."""
    return connection.pack_command(*args) if hiredis_pack is None else [hiredis_pack(args)]


def refuses_for_now(error: Exception) -> bool:
    """Whether a reply says that the server ran nothing of the command, and may run it in a moment.

    So speaks a server that fails over, has lost its disk or replicas, is held up by a script, or full. (LOADING is a
    lost connection in redis-py's eyes.)
    """
    # redis-py 8 takes the code out of what nodes of a cluster say, and has classes for it.
    is_of_cluster = isinstance(error, ClusterDownError | TryAgainError)
    return is_read_only(error) or tells_of_fullness(error) or is_of_cluster or _NOT_NOW.search(str(error)) is not None


def refuses_login(error: BaseException) -> bool:
    """Whether a connection failed for its user or password; redis-py wraps what happened while connecting."""
    causes = (error, error.__cause__, error.__context__, *error.args)
    return any(isinstance(cause, AuthenticationError) for cause in causes)


def pause_after(error: BaseException) -> float:
    """Return the seconds to wait before the next connection, after one that ended by ``error``.

    A server that wants a password and got none says so to the first command.
    """
    return LOGIN_PAUSE_S if refuses_login(error) else RETRY_PAUSE_S


def tells_of_disk(error: Exception) -> bool:
    """Whether a reply says that the server cannot save to its disk, and therefore takes no writes, nor PINGs."""
    return isinstance(error, ResponseError) and str(error).startswith("MISCONF")


def is_read_only(error: Exception) -> bool:
    """Whether a reply says that the server is a replica, to which nobody writes."""
    return isinstance(error, ReadOnlyError) or _READ_ONLY.search(str(error)) is not None


def tells_of_fullness(error: Exception) -> bool:
    """Whether a reply says that the server has no memory for a write. A script is refused at its first write."""
    return isinstance(error, OutOfMemoryError) or _FULL.search(str(error)) is not None


def sends_away(error: Exception) -> bool:
    """Whether a node of a cluster says that another serves the key, or will in a moment."""
    return isinstance(error, AskError) or str(error).startswith(("MOVED ", "ASK "))


def tells_of_move(error: Exception) -> bool:
    """Whether it says that another node serves the key from now on."""
    return isinstance(error, MovedError) or str(error).startswith("MOVED ")


def parse_redirect(error: Exception) -> str | None:
    """Return the shard to which a script redirects; None if the error is not a redirect.

    It is the name of a shard; or ``MOVING`` and a token, while the model's keys are being moved to this server.
    """
    code, _, place = str(error).partition(" ")
    return place if code == "ELSEWHERE" and isinstance(error, ResponseError) else None


def full_error(url: str, error: Exception) -> RedisFullError:
    """Return the error of an enqueue that a full server refused."""
    return RedisFullError(
        f"Redis at {mask_url(url)} is full ({error}); nothing was enqueued: raise its maxmemory, or keep results for a "
        "shorter time (result_ttl_s)",
        retry_after_s=FULL_RETRY_AFTER_S,
    )


def unavailable_error(url: str, error: BaseException) -> RedisUnavailableError:
    """Return the error of a command that was not answered, or refused for too long."""
    server = mask_url(url)
    if isinstance(error, Exception) and tells_of_fullness(error):
        return RedisUnavailableError(f"Redis at {server} is full ({error}); raise its maxmemory, or free memory there")
    return RedisUnavailableError(
        f"Redis at {server} does not answer ({error}); check that it runs and that the URL, password and network let "
        "this machine in"
    )


def make_pool(url: str) -> ConnectionPool:
    """Return a pool for ``open_connection``.

    Its connections have no ``socket_timeout``, whatever the URL says and redis-py has as default (from 8 on 5 s): many
    tasks share one, on which nothing may come for hours. Who waits for an answer on it sees to it that one comes.

    Raises:
        ConfigurationError: the URL cannot be read.
    """
    pool = parse_pool(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
    pool.connection_kwargs["socket_timeout"] = None
    return pool


async def heed_cancellation(work: Awaitable[T]) -> T:
    """Await ``work``, which is not ours, and end by CancelledError even if it swallows a cancellation.

    So does ``asyncio.wait_for`` up to Python 3.11, when what it waits for is done in the same turn of the loop;
    redis-py writes with it where there is a ``socket_timeout``. A task that loops would then never end, nor would who
    waits for its end. ``Task.cancelling`` counts what was asked for, heard or not.
    """
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        return await work
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


async def open_connection(pool: ConnectionPool) -> AbstractConnection:
    """Connect and log in; one of ``LOST`` if that takes longer than ``CONNECT_TIMEOUT_S``.

    redis-py limits the connecting alone: a stopped server's kernel accepts, and then nobody answers the greeting. A
    refused login is raised after ``LOGIN_PAUSE_S``, since all who wait for a connection try again at once.
    """
    connection = pool.make_connection()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await heed_cancellation(connection.connect())
    except BaseException as error:
        await close_connection(connection)
        if refuses_login(error):
            await asyncio.sleep(LOGIN_PAUSE_S)
        raise
    return connection


async def close_connection(connection: AbstractConnection) -> None:
    """Drop a connection without waiting for the other side."""
    with contextlib.suppress(*LOST):
        await connection.disconnect(nowait=True)


class Outage:
    """The time for which Redis is unavailable: logs a warning at most every ``WARN_EVERY_S``, and the end."""

    def __init__(self, url: str, used_for: str) -> None:
        self._log = log.bind(url=mask_url(url), used_for=used_for)
        self._began_at: float | None = None
        self._warn_at = 0.0
        self._is_reported = False

    @property
    def is_on(self) -> bool:
        return self._began_at is not None

    def note(self, error: BaseException) -> None:
        """Record that Redis is unavailable."""
        now = time.monotonic()
        if self._began_at is None:
            self._began_at, self._is_reported = now, False
        if now >= self._warn_at:
            self._warn_at, self._is_reported = now + WARN_EVERY_S, True
            self._tell_of_it(round(now - self._began_at, 1), str(error) or type(error).__name__)

    def over(self) -> None:
        """Record that Redis has answered, and log it if a warning was logged."""
        if self._began_at is not None and self._is_reported:
            self._tell_of_the_end(round(time.monotonic() - self._began_at, 1))
        self._began_at = None

    def _tell_of_it(self, away_s: float, reason: str) -> None:
        self._log.warning("redis_away", away_s=away_s, reason=reason)

    def _tell_of_the_end(self, away_s: float) -> None:
        self._log.info("redis_back", away_s=away_s)


class Fullness(Outage):
    """The time for which Redis answers, but has no memory for writes; logged as an outage."""

    def _tell_of_it(self, away_s: float, reason: str) -> None:
        self._log.warning("redis_full", full_s=away_s, reason=reason)

    def _tell_of_the_end(self, away_s: float) -> None:
        self._log.info("redis_has_room", full_s=away_s)


async def clear_away(
    tasks: list[asyncio.Task[None]], dropper: asyncio.Task[Any] | None, connection: AbstractConnection
) -> None:
    """End the tasks of a dropped connection and close it; the task that dropped it ends by itself."""
    for task in tasks:
        if task is not dropper:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await close_connection(connection)


def in_parts(items: Sequence[T], arguments_each: int = 1) -> Iterator[Sequence[T]]:
    """Iterate over ``items`` in parts that fit into one command; not at all if there are none.

    Args:
        arguments_each: number of arguments per item.
    """
    size = MAX_ARGUMENTS // arguments_each
    if len(items) <= size:  # nearly always
        if items:
            yield items
        return
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Unsent:
    """Unsent bytes of ``connection``, compared from check to check."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._transport: Any = getattr(getattr(connection, "_writer", None), "transport", None)
        self._num_bytes = 0

    def has_shrunk(self) -> bool:
        """Whether there are fewer than at the last call."""
        before, self._num_bytes = self._num_bytes, self._count_bytes()
        return self._num_bytes < before

    def _count_bytes(self) -> int:
        """Return the bytes that the other end has not confirmed: those of the transport and of the system."""
        if self._transport is None or self._transport.is_closing():
            return 0
        num_bytes = 0
        socket = self._transport.get_extra_info("socket")
        if fcntl is not None and termios is not None and socket is not None:
            with suppress(OSError):
                num_bytes = int.from_bytes(fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._transport.get_write_buffer_size() + num_bytes
