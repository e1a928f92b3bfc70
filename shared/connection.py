"""Two connections to Redis, each shared by all tasks of a process: one for commands, one for subscriptions.

Commands of many tasks are pipelined: each loop turn's commands leave in one write, and replies are handed out in
order. A pool would open a connection per waiting task instead. redis-py opens the sockets, so every URL,
TLS and authentication option it knows works here; only the multiplexing is ours.

Sources: Redis protocol, "Pipelining"; redis-py's ``asyncio.Connection``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from .redis_access.check import check_redis
from .redis_access.link import (
    FULL_PAUSE_S,
    LOST,
    RETRY_PAUSE_S,
    Fullness,
    Outage,
    Unsent,
    clear_away,
    full_error,
    heed_cancellation,
    is_read_only,
    make_pool,
    open_connection,
    pack_command,
    pause_after,
    refuses_for_now,
    tells_of_fullness,
    unavailable_error,
)
from .redis_access.replies import deliver_replies
from .redis_access.subscriber import DatabaseChannels, Subscriber, Subscription
from .values.checks import unencodable
from .values.names import DEFAULT_NAMESPACE
from .values.shown import mask_url

__all__ = ["RETRY_FOR_S", "CommandConnection", "Subscriber", "Subscription", "checked_connection"]

RETRY_FOR_S = 60.0
# A connection on which commands wait is dropped after this many looks in a row that found no reply, nor that a part of
# a large one had come, or of a large command gone. Looks are counted, not seconds: a process that was itself stopped
# for a while must read what has come before it judges.
LOOK_INTERVAL_S = 1.0
MAX_SILENT_LOOKS = 5


class CommandConnection:
    """Runs commands of any number of tasks over one connection, in order.

    A lost connection is opened again, and commands in flight are sent again for up to ``retry_for_s`` (``inf`` for
    ever): all of Penstock's scripts may run twice without harm, except ``claim``, which asks for ``retry=False``.
    A connection counts as lost, too, when commands wait and nothing comes or goes for 5 s, and when the server says
    that it is loading, failing over or busy. What a full server refuses is sent again, too, over the same connection.

    Args:
        on_moved: called when a server has done what one before it refused to: there may have been a failover.
    """

    def __init__(
        self, url: str, *, retry_for_s: float = RETRY_FOR_S, on_moved: Callable[[], None] | None = None
    ) -> None:
        self._url = url
        self._pool = make_pool(url)
        self._channels = DatabaseChannels(self._pool)
        self._retry_for_s = retry_for_s
        self._on_moved = on_moved
        self._has_refused = False
        self._read_only_since: float | None = None
        self._connection: AbstractConnection | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._outbox: list[bytes] = []
        self._has_output = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._outage = Outage(url, "commands")
        self._fullness = Fullness(url, "commands")
        self._next_look: asyncio.TimerHandle | None = None
        self._num_silent_looks = 0
        self._pause_s = 0.0  # before the next attempt to connect
        self._leftovers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return mask_url(self._url)

    @property
    def read_only_for_s(self) -> float:
        """Seconds for which the server has refused writes as a replica; 0 if it has not, or none were tried."""
        since = self._read_only_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def link_to(self, key: str) -> CommandConnection:
        """Return the connection to the server of a key, for what is asked of servers; where there is one, this."""
        return self

    async def open(self) -> None:
        """Connect now rather than at the first command.

        Raises:
            RedisUnavailableError: nothing answers at the URL, or it refuses us.
        """
        try:
            await self._ensure_open()
        except LOST as error:
            raise unavailable_error(self._url, error) from error

    async def execute(self, *args: Any, retry: bool = True, waits_if_full: bool = True) -> Any:
        """Run one command and return its reply, bytes undecoded.

        Raises:
            RedisUnavailableError: the connection stayed lost for ``retry_for_s``, or ``retry`` is False; or Redis was
                full for so long.
            RedisFullError: Redis is full, and ``waits_if_full`` is False. The command was not run.
            ValidationError: an argument is text that cannot be encoded; nothing was sent.
            redis.exceptions.ResponseError: Redis refused the command.
        """
        loop = asyncio.get_running_loop()
        args = self._channels.in_command(args)
        give_up_at = loop.time() + self._retry_for_s
        may_have_run = was_full = was_refused = False
        while True:
            connection = None
            try:
                connection = await self._ensure_open()
                reply = await self._put_in_outbox(connection, args)
            except (*LOST, ResponseError) as error:
                is_refusal, is_full = refuses_for_now(error), tells_of_fullness(error)
                if isinstance(error, ResponseError) and not is_refusal:
                    raise
                if is_full and not waits_if_full and not may_have_run:
                    raise full_error(self._url, error) from error
                # What was refused has not run, so it may be sent again even where ``retry`` is False.
                if self._closed or not (retry or is_refusal) or loop.time() > give_up_at:
                    raise unavailable_error(self._url, error) from error
                may_have_run |= not is_refusal and connection is not None
                was_full |= is_full
                if is_full:
                    self._fullness.note(error)
                    await asyncio.sleep(FULL_PAUSE_S)
                    continue
                self._outage.note(error)
                was_refused |= is_refusal
                self._note_refusal(error, connection)
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                if was_full:
                    self._fullness.over()
                if was_refused:
                    self._note_done()
                return reply

    async def run_script(self, script: Any, keys: list[str], args: list[Any], **how: bool) -> Any:
        """Run a ``Script`` by its hash, and by its text where the server does not know it (after a restart).

        Args:
            how: as of ``execute``.
        """
        script = self.script_here(script)
        try:
            return await self.execute("EVALSHA", script.sha, len(keys), *keys, *args, **how)
        except NoScriptError:
            return await self.execute("EVAL", script.text, len(keys), *keys, *args, **how)

    def script_here(self, script: Any) -> Any:
        """Return a ``Script`` as it is run in the database of this connection."""
        return self._channels.in_script(script)

    async def close(self) -> None:
        """Drop the connection; commands in flight fail."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._next_look is not None:
            self._next_look.cancel()
        if self._connection is not None:
            self._drop(RedisConnectionError("closed"), self._connection)
        if self._leftovers:
            await asyncio.wait(self._leftovers)

    async def _ensure_open(self) -> AbstractConnection:
        """Return the connection; all tasks that miss it wait for one attempt to open it."""
        while self._connection is None:
            if self._closed:
                raise RedisConnectionError("the connection was closed")
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._open())
                # Heard even if all who wait for it are cancelled meanwhile.
                self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            opening = self._opening
            await asyncio.wait([opening])
            if not opening.cancelled() and (error := opening.exception()) is not None:
                raise error
        return self._connection

    async def _open(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = 0.0
        connection = await open_connection(self._pool)
        self._connection = connection
        self._outbox = []
        self._has_output = asyncio.Event()
        self._num_silent_looks = 0
        self._unsent = Unsent(connection)
        self._tasks = [
            asyncio.create_task(self._write_outbox(connection, self._has_output)),
            asyncio.create_task(self._read_replies(connection)),
        ]

    def _note_refusal(self, error: Exception, connection: AbstractConnection | None) -> None:
        if not isinstance(error, ResponseError):
            return
        if not is_read_only(error):
            self._read_only_since = None
        elif self._read_only_since is None:
            self._read_only_since = asyncio.get_running_loop().time()
        if connection is not None:
            # After a failover the URL may lead to another server.
            self._has_refused = True
            self._drop(error, connection)

    def _note_done(self) -> None:
        """Record that a refused command was run, by another server or by the same one."""
        self._read_only_since = None
        if self._has_refused:
            self._has_refused = False
            if self._on_moved is not None:
                self._on_moved()

    def _put_in_outbox(self, connection: AbstractConnection, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Put a command into the outbox; returns the future of its reply."""
        try:
            packed = pack_command(connection, args)
        except UnicodeEncodeError as error:
            raise unencodable(f"an argument of {args[0]}", error.object, error) from None
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(reply)
        self._outbox += packed
        self._has_output.set()
        if self._next_look is None:
            self._num_silent_looks = 0
            self._next_look = loop.call_later(LOOK_INTERVAL_S, self._look)
        return reply

    async def _write_outbox(self, connection: AbstractConnection, has_output: asyncio.Event) -> None:
        try:
            while True:
                await has_output.wait()
                has_output.clear()
                commands, self._outbox = self._outbox, []
                await heed_cancellation(connection.send_packed_command(commands, check_health=False))
        except Exception as error:
            self._drop(error, connection)

    async def _read_replies(self, connection: AbstractConnection) -> None:
        try:
            await deliver_replies(connection, partial(self._pass_reply, self._waiting), self._note_part)
        except Exception as error:
            # Whatever it is, a reply that nobody reads would be waited for in vain.
            self._drop(error, connection)

    def _note_part(self) -> None:
        self._num_silent_looks = 0

    def _pass_reply(self, waiting: deque[asyncio.Future[Any]], reply: Any) -> None:
        """Give a reply to the command that has waited longest on its connection."""
        self._num_silent_looks = 0
        future = waiting.popleft()
        is_error = isinstance(reply, Exception)
        if self._outage.is_on and not (is_error and refuses_for_now(reply)):
            self._outage.over()
        if future.cancelled():
            return
        if is_error:
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _look(self) -> None:
        """Drop a connection that died without a word; TCP alone would wait for many minutes."""
        self._next_look = None
        if not self._waiting or self._connection is None:
            return
        self._num_silent_looks = 0 if self._unsent.has_shrunk() else self._num_silent_looks + 1
        if self._num_silent_looks > MAX_SILENT_LOOKS:
            error = RedisConnectionError(f"no reply for {MAX_SILENT_LOOKS * LOOK_INTERVAL_S:g} s")
            self._drop(error, self._connection)
        else:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look)

    def _drop(self, error: BaseException, connection: AbstractConnection) -> None:
        """Give up a connection, if that was not done before: what waits for replies on it fails now."""
        if connection is not self._connection:
            return
        self._connection = None
        self._pause_s = max(0.0, pause_after(error) - RETRY_PAUSE_S)
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(RedisConnectionError(str(error) or type(error).__name__))
        leftover = asyncio.create_task(clear_away(self._tasks, asyncio.current_task(), connection))
        self._leftovers.add(leftover)
        leftover.add_done_callback(self._leftovers.discard)


@asynccontextmanager
async def checked_connection(url: str, *, namespace: str = DEFAULT_NAMESPACE) -> AsyncIterator[CommandConnection]:
    """Open the connection of a CLI command, after ``check_redis``."""
    await check_redis(url, namespace=namespace)
    connection = CommandConnection(url)
    try:
        yield connection
    finally:
        await connection.close()
