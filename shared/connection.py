"""Two connections to Redis, each shared by all tasks of a process: one for commands, one for subscriptions.

Commands of many tasks are pipelined: each loop turn's commands leave in one write, and replies are handed out in
order. A pool would open a connection per waiting task instead. redis-py opens the sockets, so every URL,
TLS and authentication option it knows works here; only the multiplexing is ours.

Sources: Redis protocol, "Pipelining"; redis-py's ``asyncio.Connection``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .errors import BrokerError, RedisUnavailableError
from .redis_url import mask_url, parse_pool

CONNECT_TIMEOUT_S = 5.0
RETRY_FOR_S = 30.0
RETRY_PAUSE_S = 0.05
PING_INTERVAL_S = 5.0

LOST = (RedisConnectionError, RedisTimeoutError, OSError, asyncio.IncompleteReadError)


log = structlog.get_logger()


class CommandConnection:
    """Runs commands of any number of tasks over one connection, in order.

    A lost connection is opened again, and commands in flight are sent again for up to ``retry_for_s``: all of
    Penstock's scripts may run twice without harm, except ``claim``, which asks for ``retry=False``.
    """

    def __init__(self, url: str, *, retry_for_s: float = RETRY_FOR_S) -> None:
        self._url = url
        self._pool = parse_pool(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
        self._retry_for_s = retry_for_s
        self._connection: AbstractConnection | None = None
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._outbox: list[bytes] = []
        self._has_output = asyncio.Event()
        self._opening = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def open(self) -> None:
        """Connect now rather than at the first command.

        Raises:
            RedisUnavailableError: nothing answers at the URL, or it refuses us.
        """
        try:
            await self._ensure_open()
        except LOST as error:
            raise self._unavailable(error) from error

    async def execute(self, *args: Any, retry: bool = True) -> Any:
        """Run one command and return its reply, bytes undecoded.

        Raises:
            RedisUnavailableError: the connection stayed lost for ``retry_for_s``, or ``retry`` is False.
            redis.exceptions.ResponseError: Redis refused the command.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._retry_for_s
        while True:
            try:
                connection = await self._ensure_open()
                reply: asyncio.Future[Any] = loop.create_future()
                self._waiting.append(reply)
                self._outbox += connection.pack_command(*args)
                self._has_output.set()
                return await reply
            except LOST as error:
                if self._closed or not retry or loop.time() > give_up_at:
                    raise self._unavailable(error) from error
                await asyncio.sleep(RETRY_PAUSE_S)

    async def run_script(self, script: Any, keys: list[str], args: list[Any], *, retry: bool = True) -> Any:
        """Run a ``Script`` by its hash, and by its text where the server does not know it (after a restart)."""
        try:
            return await self.execute("EVALSHA", script.sha, len(keys), *keys, *args, retry=retry)
        except NoScriptError:
            return await self.execute("EVAL", script.text, len(keys), *keys, *args, retry=retry)

    async def close(self) -> None:
        """Drop the connection; commands in flight fail."""
        self._closed = True
        await self._drop(RedisConnectionError("closed"))

    async def _ensure_open(self) -> AbstractConnection:
        if self._connection is not None:
            return self._connection
        if self._closed:
            raise RedisConnectionError("the connection was closed")
        async with self._opening:
            if self._connection is None:
                connection = self._pool.make_connection()
                await connection.connect()
                self._connection = connection
                self._outbox = []
                self._has_output = asyncio.Event()
                self._tasks = [
                    asyncio.create_task(self._write(connection, self._has_output)),
                    asyncio.create_task(self._read(connection)),
                ]
            return self._connection

    async def _write(self, connection: AbstractConnection, has_output: asyncio.Event) -> None:
        try:
            while True:
                await has_output.wait()
                has_output.clear()
                commands, self._outbox = self._outbox, []
                await connection.send_packed_command(commands, check_health=False)
        except LOST as error:
            await self._drop(error, of=connection)

    async def _read(self, connection: AbstractConnection) -> None:
        waiting = self._waiting
        try:
            while True:
                try:
                    reply = await connection.read_response(disconnect_on_error=False)
                except ResponseError as error:
                    reply = error
                future = waiting.popleft()
                if future.cancelled():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except LOST as error:
            await self._drop(error, of=connection)

    async def _drop(self, error: BaseException, of: AbstractConnection | None = None) -> None:
        connection = self._connection
        if connection is None or (of is not None and of is not connection):
            return
        self._connection = None
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(RedisConnectionError(str(error)))
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(*LOST):
            await connection.disconnect(nowait=True)

    def _unavailable(self, error: BaseException) -> RedisUnavailableError:
        return RedisUnavailableError(
            f"Redis at {mask_url(self._url)} does not answer ({error}); "
            "check that it runs and that the URL, password and network let this machine in"
        )


class Subscription:
    """One callback on one channel of a ``Subscriber``."""

    __slots__ = ("channel", "confirmed", "on_message", "on_restored")

    def __init__(
        self, channel: bytes, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None
    ) -> None:
        self.channel = channel
        self.on_message = on_message
        self.on_restored = on_restored
        self.confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Subscriber:
    """Follows any number of channels over one connection, and comes back by itself when it is lost.

    Messages sent while it was away are missing, so each subscription's ``on_restored`` is called after the
    channel is confirmed again: the reader then looks at its log.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = parse_pool(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
        self._connection: AbstractConnection | None = None
        self._subscriptions: dict[bytes, list[Subscription]] = {}
        self._outbox: list[bytes] = []
        self._has_output = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard = False

    async def open(self) -> None:
        """Connect and start to follow.

        Raises:
            RedisUnavailableError: nothing answers at the URL, or it refuses us.
        """
        try:
            self._connection = await self._connect()
        except LOST as error:
            raise RedisUnavailableError(f"Redis at {mask_url(self._url)} does not answer ({error})") from error
        self._task = asyncio.create_task(self._run())

    async def subscribe(
        self, channel: str, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None = None
    ) -> Subscription:
        """Call ``on_message`` with every message of ``channel``; returns when Redis has confirmed it."""
        subscription = Subscription(channel.encode(), on_message, on_restored)
        others = self._subscriptions.setdefault(subscription.channel, [])
        others.append(subscription)
        if len(others) > 1 and others[0].confirmed.done():
            subscription.confirmed.set_result(None)
        else:
            self._send("SUBSCRIBE", subscription.channel)
        try:
            await asyncio.shield(subscription.confirmed)
        except asyncio.CancelledError:
            self.unsubscribe(subscription)
            raise
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop the callbacks at once; doing it twice does nothing."""
        others = self._subscriptions.get(subscription.channel, [])
        if subscription not in others:
            return
        others.remove(subscription)
        if not others:
            del self._subscriptions[subscription.channel]
            self._send("UNSUBSCRIBE", subscription.channel)

    async def close(self) -> None:
        """Drop the connection and every subscription."""
        self._subscriptions.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()

    def _send(self, *args: Any) -> None:
        if self._connection is not None:
            self._outbox += self._connection.pack_command(*args)
            self._has_output.set()

    async def _connect(self) -> AbstractConnection:
        connection = self._pool.make_connection()
        await connection.connect()
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*LOST):
                await connection.disconnect(nowait=True)

    async def _run(self) -> None:
        while True:
            if self._connection is not None:
                await self._serve(self._connection)
                await self._disconnect()
            try:
                connection = await self._connect()
            except LOST:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            self._connection, self._outbox = connection, []
            if self._subscriptions:
                self._send("SUBSCRIBE", *self._subscriptions)

    async def _serve(self, connection: AbstractConnection) -> None:
        """Run the three loops until one of them loses the connection."""
        loops = [asyncio.create_task(loop(connection)) for loop in (self._read, self._write, self._ping)]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in loops:
                task.cancel()
            results = await asyncio.gather(*loops, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, LOST):
                raise result

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            if self._outbox:
                commands, self._outbox = self._outbox, []
                await connection.send_packed_command(commands, check_health=False)
            self._has_output.clear()
            if not self._outbox:
                await self._has_output.wait()

    async def _ping(self, connection: AbstractConnection) -> None:
        """Notice a connection that died without a word: TCP alone would wait for many minutes."""
        while True:
            self._heard = False
            self._send("PING")
            await asyncio.sleep(PING_INTERVAL_S)
            if not self._heard:
                raise RedisConnectionError("no answer to PING")

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            reply = await connection.read_response(disconnect_on_error=False)
            self._heard = True
            if not isinstance(reply, list) or len(reply) != 3:
                continue  # PONG
            kind, channel, data = reply
            if kind == b"message":
                for subscription in tuple(self._subscriptions.get(channel, ())):
                    self._deliver(subscription, data)
            elif kind == b"subscribe":
                self._confirm(channel)
            elif kind != b"unsubscribe":
                raise BrokerError(f"unexpected message in a subscription: {kind!r}")

    def _deliver(self, subscription: Subscription, data: bytes) -> None:
        """Run one callback; its failure must not end the reading for all the others."""
        try:
            subscription.on_message(data)
        except Exception:
            log.exception("a message could not be handled", channel=subscription.channel.decode(errors="replace"))

    def _confirm(self, channel: bytes) -> None:
        for subscription in self._subscriptions.get(channel, ()):
            if not subscription.confirmed.done():
                subscription.confirmed.set_result(None)
            elif subscription.on_restored is not None:
                subscription.on_restored()
