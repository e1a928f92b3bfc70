"""Waiting times for a body."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.producer.web.connection import MIN_BYTES_PER_S, RequestBody


def receiver(*messages: Any) -> Any:
    """An ASGI ``receive`` that gives the messages, and then nothing."""
    left = list(messages)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(num_bytes: int, *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": bytes(num_bytes), "more_body": more_body}


async def test_received_bytes_extend_the_time_limit() -> None:
    body = RequestBody(receiver(part(1000 * MIN_BYTES_PER_S), part(1000 * MIN_BYTES_PER_S)), 60.0, TimeoutError)
    await body()
    await body()
    assert 1500 < body.time_left_s <= 2060


async def test_missing_bytes_are_a_timeout() -> None:
    body = RequestBody(receiver(part(1)), 0.01, ConnectionError)
    await body()
    with pytest.raises(ConnectionError, match=r"not complete after 0\.01 s"):
        await body()
    assert body.is_late


async def test_after_the_end_of_a_body_nothing_is_too_late() -> None:
    disconnected = asyncio.Event()

    async def receive() -> Any:
        if disconnected.is_set():
            await asyncio.wait_for(asyncio.Event().wait(), 0.05)  # longer than the body may take
        disconnected.set()
        return part(0, more_body=False)

    body = RequestBody(receive, 0.01, ConnectionError)
    await body()
    with pytest.raises(TimeoutError):
        await body()
    assert not body.is_late
