"""The connection for subscriptions: follows any number of channels, also after the connection is lost.

Redis delivers a message to the subscribers of all databases. Deployments in two databases must stay separate, so
the names of their channels differ. Only the connections know the database, so the names are changed there: in commands,
in subscriptions, and in the scripts, which publish ``prefix .. NAME``. Nothing is changed in database 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from ..errors import BrokerError, RedisUnavailableError
from ..keys import channel_in, lua_channel_prefix_in
from ..process.log import get_logger
from ..values.shown import mask_url, shown
from .link import (
    LOST,
    MAX_ARGUMENTS,
    RETRY_PAUSE_S,
    Outage,
    close_connection,
    heed_cancellation,
    make_pool,
    open_connection,
    pack_command,
    pause_after,
    refuses_for_now,
    tells_of_disk,
)
from .replies import deliver_replies
from .script import script_of

PING_INTERVAL_S = 5.0
log = get_logger(__name__)
# Index of the first channel among the arguments. In a cluster the words are those of sharded channels.
_CHANNEL_AT = {"PUBLISH": 1, "SPUBLISH": 1, "PUBSUB": 2}
_IN_SCRIPTS = re.compile(r"('S?PUBLISH'|'(?:SHARD)?NUMSUB'), prefix\b")


class Subscription:
    """A callback on one channel of a ``Subscriber``; ``confirmed`` is for one task to wait for."""

    __slots__ = ("channel", "confirmed", "on_message", "on_restored")

    def __init__(
        self, channel: bytes, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None
    ) -> None:
        self.channel = channel
        self.on_message = on_message
        self.on_restored = on_restored
        self.confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Subscriber:
    """Follows any number of channels over one connection, and reconnects when it is lost.

    Messages sent while it was lost are missing, so each subscription's ``on_restored`` is called after the
    channel is confirmed again: the reader then reads its log.
    """

    SUBSCRIBE, UNSUBSCRIBE, MESSAGE, CHANNELS_AT_ONCE = "SUBSCRIBE", "UNSUBSCRIBE", b"message", MAX_ARGUMENTS
    SUBSCRIBED, UNSUBSCRIBED = b"subscribe", b"unsubscribe"

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = make_pool(url)
        self._channels = DatabaseChannels(self._pool)
        self._outage = Outage(url, "subscriptions")
        self._connection: AbstractConnection | None = None
        self._subscriptions: dict[bytes, list[Subscription]] = {}
        self._confirmed: set[bytes] = set()
        self._outbox: list[bytes] = []
        # Channels to subscribe to or not, as it was said last; told the server with the next write, many in a command.
        self._changes: dict[bytes, str] = {}
        self._has_output = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard = False
        self._is_doubted = asyncio.Event()

    async def open(self) -> None:
        """Connect and start to follow.

        Raises:
            RedisUnavailableError: nothing answers at the URL, or it refuses us.
        """
        try:
            self._connection = await open_connection(self._pool)
        except LOST as error:
            raise RedisUnavailableError(f"Redis at {mask_url(self._url)} does not answer ({error})") from error
        self._task = asyncio.create_task(self._keep_connected())

    def start(self) -> None:
        """Connect in the background, with as many attempts as needed. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected())

    async def subscribe(
        self, channel: str, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None = None
    ) -> Subscription:
        """Call ``on_message`` with every message of ``channel``; returns when Redis has confirmed it."""
        subscription = await self.begin(channel, on_message, on_restored)
        try:
            await subscription.confirmed
        except asyncio.CancelledError:
            self.unsubscribe(subscription)
            raise
        return subscription

    async def begin(
        self, channel: str, on_message: Callable[[bytes], None], on_restored: Callable[[], None] | None = None
    ) -> Subscription:
        """``subscribe`` without waiting: no message is missed once ``confirmed`` is done."""
        subscription = Subscription(channel.encode(), on_message, on_restored)
        self.follow(subscription)
        return subscription

    def follow(self, subscription: Subscription) -> None:
        """Begin to follow the channel of a subscription; one that was confirmed elsewhere is restored here."""
        channel = self._channels.in_subscription(subscription.channel)
        self._subscriptions.setdefault(channel, []).append(subscription)
        if channel in self._confirmed:
            _settle(subscription)
        else:
            self._change_channels(self.SUBSCRIBE, channel)

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop the callbacks immediately. Idempotent."""
        channel = self._channels.in_subscription(subscription.channel)
        others = self._subscriptions.get(channel, [])
        if subscription not in others:
            return
        others.remove(subscription)
        if not others:
            del self._subscriptions[channel]
            self._confirmed.discard(channel)
            self._change_channels(self.UNSUBSCRIBE, channel)

    def reconnect(self) -> None:
        """Connect again, since the server that answers may no longer be the primary."""
        self._is_doubted.set()

    async def close(self) -> None:
        """Drop the connection and every subscription."""
        self._subscriptions.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()

    def _change_channels(self, verb: str, channel: bytes) -> None:
        if self._connection is not None:
            self._changes[channel] = verb
            self._has_output.set()

    def _pack_changes(self, connection: AbstractConnection) -> list[bytes]:
        changes, self._changes = self._changes, {}
        packed: list[bytes] = []
        for verb in (self.SUBSCRIBE, self.UNSUBSCRIBE):
            channels = [channel for channel, wanted in changes.items() if wanted == verb]
            for start in range(0, len(channels), self.CHANNELS_AT_ONCE):
                packed += pack_command(connection, (verb, *channels[start : start + self.CHANNELS_AT_ONCE]))
        return packed

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    async def _keep_connected(self) -> None:
        while True:
            if self._connection is not None:
                error = await self._serve_connection(self._connection)
                self._outage.note(error)
                await self._disconnect()
                # A server that is loading lets us in and then refuses; do not ask it without a pause.
                await asyncio.sleep(pause_after(error))
            try:
                connection = await open_connection(self._pool)
            except Exception as error:
                # Nobody would restart this task: whatever keeps us out is told in the log, and tried again.
                self._outage.note(error)
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            self._connection, self._outbox = connection, []
            self._changes = dict.fromkeys(self._subscriptions, self.SUBSCRIBE)

    async def _serve_connection(self, connection: AbstractConnection) -> BaseException:
        """Run the loops until one of them loses the connection; returns how."""
        loops = [
            asyncio.create_task(loop(connection))
            for loop in (self._read_replies, self._write_changes, self._ping, self._doubt)
        ]
        try:
            finished, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        error = finished.pop().exception()
        assert error is not None, "the loops end by an error only"
        if not isinstance(error, LOST) and not (isinstance(error, Exception) and refuses_for_now(error)):
            log.error("subscription_failed", exc_info=error)
        return error

    async def _write_changes(self, connection: AbstractConnection) -> None:
        while True:
            if self._outbox or self._changes:
                commands, self._outbox = [*self._outbox, *self._pack_changes(connection)], []
                await heed_cancellation(connection.send_packed_command(commands, check_health=False))
            self._has_output.clear()
            if not self._outbox and not self._changes:
                await self._has_output.wait()

    async def _ping(self, connection: AbstractConnection) -> None:
        """Detect a connection that died silently: TCP alone would wait for many minutes."""
        while True:
            self._heard = False
            self._outbox += pack_command(connection, ("PING",))
            self._has_output.set()
            await asyncio.sleep(PING_INTERVAL_S)
            if not self._heard:
                raise RedisConnectionError("no answer to PING")

    async def _doubt(self, connection: AbstractConnection) -> None:
        self._is_doubted.clear()
        await self._is_doubted.wait()
        raise RedisConnectionError("there was a failover")

    async def _read_replies(self, connection: AbstractConnection) -> None:
        await deliver_replies(connection, self._pass_reply, self._note_part)

    def _note_part(self) -> None:
        self._heard = True

    def _pass_reply(self, reply: Any) -> None:
        self._heard = True
        self._outage.over()
        if isinstance(reply, Exception):
            if tells_of_disk(reply):
                return  # a PONG as well: messages still come
            raise reply
        if not isinstance(reply, list) or len(reply) != 3:
            return  # PONG
        kind, channel, data = reply
        if kind == self.MESSAGE:
            subscriptions = self._subscriptions.get(channel, ())
            # A callback may end its own subscription, or begin others.
            for subscription in subscriptions if len(subscriptions) == 1 else tuple(subscriptions):
                self._deliver(subscription, data)
        elif kind == self.SUBSCRIBED:
            self._confirm(channel)
        elif kind != self.UNSUBSCRIBED:
            raise BrokerError(f"unexpected message in a subscription: {shown(kind)}")

    def _deliver(self, subscription: Subscription, data: bytes) -> None:
        """Run one callback; its failure must not end the reading for all the others."""
        try:
            subscription.on_message(data)
        except Exception:
            log.exception("message_not_handled", channel=subscription.channel.decode(errors="replace"))

    def _confirm(self, channel: bytes) -> None:
        if channel not in self._subscriptions:
            return
        self._confirmed.add(channel)
        for subscription in self._subscriptions[channel]:
            _settle(subscription)


def _settle(subscription: Subscription) -> None:
    """Mark the channel as confirmed, for the first time or again."""
    if not subscription.confirmed.done():
        subscription.confirmed.set_result(None)
    elif subscription.on_restored is not None:
        subscription.on_restored()


class DatabaseChannels:
    """Names of channels in the database to which the connections of a pool belong."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.database = int(pool.connection_kwargs.get("db") or 0)
        self._scripts: dict[str, Any] = {}

    def in_command(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a command with the names that its channels have in this database."""
        place = _CHANNEL_AT.get(args[0]) if self.database else None
        if place is None:
            return args
        return (*args[:place], channel_in(self.database, args[place]), *args[place + 1 :])

    def in_script(self, script: Any) -> Any:
        """Return a script (with ``text`` and ``sha``) that publishes in this database."""
        if not self.database:
            return script
        if script.sha not in self._scripts:
            text = _IN_SCRIPTS.sub(rf"\1, {lua_channel_prefix_in(self.database)}", script.text)
            self._scripts[script.sha] = script_of(script.name, text)
        return self._scripts[script.sha]

    def in_subscription(self, channel: bytes) -> bytes:
        """Return the name of a channel to subscribe to."""
        return channel_in(self.database, channel.decode()).encode() if self.database else channel
