"""Replies that are handed on as they come, and a connection's end."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from penstock.shared.redis_access.link import close_connection, make_pool, open_connection
from penstock.shared.redis_access.replies import deliver_replies

from ....processes import DEADLINE_S


async def test_a_connection_closed_right_after_its_last_reply_is_detected(redis_url: str) -> None:
    connection = await open_connection(make_pool(redis_url))
    try:
        await connection.send_command("QUIT")
        assert await connection.read_response() == b"OK"
        reader = connection._reader
        assert isinstance(reader, asyncio.StreamReader)
        while not reader.at_eof():
            await asyncio.sleep(0)
        with pytest.raises(RedisConnectionError):
            async with asyncio.timeout(DEADLINE_S):
                await deliver_replies(connection, print)
    finally:
        await close_connection(connection)
