"""Delivers the replies of a connection that redis-py has opened.

redis-py knows every kind of URL, TLS and log-in, and parses replies one ``await`` at a time. Once it has logged in, its
transport is given another protocol, in which hiredis cuts replies out of the bytes and hands on all that have come, in
the callback that brought them: no task wakes up, and a message costs a sixth. Writing and closing stay redis-py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

try:
    import hiredis
except ImportError:
    hiredis = None
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from .link import heed_cancellation

_NOT_ENOUGH = object()


async def deliver_replies(
    connection: AbstractConnection, on_reply: Callable[[Any], None], on_part: Callable[[], None] = lambda: None
) -> NoReturn:
    """Call ``on_reply`` with each reply, in order, until the connection is lost; a refusal comes as an exception.

    To be called once, when all replies so far have been read. Without hiredis, redis-py reads them.

    Args:
        on_part: called when bytes have come that end no reply; without hiredis it never is.

    Raises:
        redis.exceptions.ConnectionError, OSError: how the connection was lost, or that the server is loading.
        Exception: what ``on_reply`` raised.
    """
    writer: asyncio.StreamWriter | None = getattr(connection, "_writer", None)
    if hiredis is None or writer is None:
        await _read_each(connection, on_reply)
    transport: asyncio.Transport = writer.transport  # type: ignore[assignment,union-attr]  # a stream has such a one
    protocol = _ReplyProtocol(transport.get_protocol(), on_reply, on_part)
    transport.set_protocol(protocol)
    # An end that came with the last reply was told to the protocol before.
    reader: asyncio.StreamReader | None = getattr(connection, "_reader", None)
    if transport.is_closing() or (reader is not None and reader.at_eof()):
        protocol.eof_received()
    await protocol.ended
    raise AssertionError("a connection ends by an error only")


async def _read_each(connection: AbstractConnection, on_reply: Callable[[Any], None]) -> NoReturn:
    while True:
        try:
            reply = await heed_cancellation(connection.read_response(disconnect_on_error=False))
        except ResponseError as error:
            reply = error
        on_reply(reply)


class _ReplyProtocol(asyncio.Protocol):
    """Reads instead of the ``streams`` protocol, which still hears of all that concerns writing and the end.

    ``ended`` fails when the connection is lost.
    """

    def __init__(self, streams: Any, on_reply: Callable[[Any], None], on_part: Callable[[], None]) -> None:
        assert hiredis is not None
        self._streams = streams
        self._on_reply = on_reply
        self._on_part = on_part
        self._reader = hiredis.Reader(replyError=DefaultParser.parse_error, notEnoughData=_NOT_ENOUGH)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        gets, on_reply = self._reader.gets, self._on_reply
        try:
            self._reader.feed(data)
            reply = gets()
            if reply is _NOT_ENOUGH:
                self._on_part()
            while reply is not _NOT_ENOUGH:
                if isinstance(reply, RedisConnectionError):  # it says that it is loading
                    raise reply
                on_reply(reply)
                reply = gets()
        except Exception as error:
            self._end_reading(error)

    def eof_received(self) -> bool:
        self._streams.eof_received()
        self._end_reading(RedisConnectionError("the server closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.connection_lost(exc)
        self._end_reading(exc or RedisConnectionError("the connection was closed"))

    def pause_writing(self) -> None:
        self._streams.pause_writing()

    def resume_writing(self) -> None:
        self._streams.resume_writing()

    def _end_reading(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
