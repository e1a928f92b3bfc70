"""The place of a waiting request: headers and comments of the gateway, with an engine that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from penstock.producer import Client
from penstock.producer.gateway.place import POSITION_HEADER, START_HEADER, Place
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.sse import COMMENT
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.stats import RequestStatus

from .harness import claim_one, serve_gateway, until, write

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "n": 2},
    "/v1/completions": {"model": "m", "prompt": ["hi", "ho"]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 5},
}


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[RequestStatus]:
    """The states that were read, in order. A request is in the queue before its state is read."""
    read: list[RequestStatus] = []
    status = Client.status

    async def recorded(client: Client, request_id: str, model: str | None = None) -> RequestStatus:
        async def is_enqueued() -> bool:
            return (await client.queue_stats(model)).depth >= 2

        if not read:
            await until(is_enqueued)
        read.append(await status(client, request_id, model))
        return read[-1]

    monkeypatch.setattr(Client, "status", recorded)
    return read


async def texts(deltas: AsyncIterator[Delta]) -> AsyncGenerator[bytes]:
    async for delta in deltas:
        yield delta.text.encode()


def comment_of(status: RequestStatus) -> bytes:
    assert status.position is not None
    start = "" if status.estimated_start_s is None else f" {START_HEADER}={status.estimated_start_s:.1f}"
    return f": {POSITION_HEADER}={status.position}{start}\n".encode()


async def test_comments_follow_the_queue_until_the_start(
    client: Client, broker: Broker, statuses: list[RequestStatus]
) -> None:
    for request_id in ("a", "b", "c", "own"):
        await client.submit("hi", request_id=request_id)
    place = Place(client, None, "own", wait_s=0.001, every_s=0.01)
    pieces = place.around(texts((await client.handle("own")).stream()))
    assert await anext(pieces) == comment_of(statuses[-1])
    assert place.headers == {POSITION_HEADER: "3"}  # no engine has claimed yet, so the start is unknown
    for num_ahead in (2, 1, 0):
        await write(broker, await claim_one(broker), 0, 72, 105, end=FinishReason.STOP)
        while statuses[-1].position != num_ahead:
            assert await anext(pieces) == comment_of(statuses[-1])
    assert statuses[-1].estimated_start_s is not None
    claim = await claim_one(broker)
    reading = asyncio.ensure_future(anext(pieces))
    while statuses[-1].position is not None:
        if reading.done():
            reading = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.001)
    num_read = len(statuses)
    await write(broker, claim, 0, 72, 105, end=FinishReason.STOP)
    assert [await reading, *[piece async for piece in pieces]] == [b"Hi"]
    assert len(statuses) == num_read
    assert place.headers == {POSITION_HEADER: "3"}


async def test_a_request_that_is_unknown_yet_is_asked_for_again(client: Client, broker: Broker) -> None:
    release = asyncio.Event()

    async def late() -> AsyncGenerator[bytes]:
        await release.wait()
        yield b"x"

    await client.submit("hi", request_id="before")
    place = Place(client, "m", "own", wait_s=0.001, every_s=0.001)
    pieces = place.around(late())
    assert (await anext(pieces), place.headers) == (COMMENT, {})
    await client.submit("hi", request_id="own")
    assert await anext(pieces) == f": {POSITION_HEADER}=1\n".encode()
    release.set()
    assert [piece async for piece in pieces if not piece.startswith(b":")] == [b"x"]


async def test_a_refusal_at_the_last_moment_is_raised_before_any_piece(client: Client, broker: Broker) -> None:
    async def refused() -> AsyncGenerator[bytes]:
        raise OpenAIError(400, "no")
        yield b""

    place = Place(client, "m", "own", wait_s=1e-9, every_s=1.0)
    with pytest.raises(OpenAIError, match="no"):
        await anext(place.around(refused()))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_accepted_requests_have_their_place(
    client: Client,
    broker: Broker,
    statuses: list[RequestStatus],
    deployment: dict[str, str],
    path: str,
    stream: bool,
) -> None:
    await client.submit("hi")
    async with serve_gateway(**deployment, status_wait_s=0.01, keep_alive_s=0.02) as http:
        asking = asyncio.ensure_future(http.post(path, json=BODIES[path] | {"stream": stream}))

        async def has_asked() -> bool:
            return bool(statuses)

        await until(has_asked)
        while not asking.done():
            for claim in (await broker.claim("e0", EngineCapacity(max_num_seqs=8))).claims:
                await write(broker, claim, 0, 72, 105, end=FinishReason.STOP)
            await asyncio.sleep(0.005)
        answer = await asking
    assert (answer.status_code, answer.headers[POSITION_HEADER]) == (200, "1")
    assert (f": {POSITION_HEADER}=1\n" in answer.text) == stream
    assert "Hi" in answer.text


async def test_a_request_that_starts_at_once_costs_no_call(
    client: Client, broker: Broker, statuses: list[RequestStatus], deployment: dict[str, str]
) -> None:
    async with serve_gateway(**deployment, status_wait_s=60.0) as http:
        for stream in (False, True):
            body = BODIES["/v1/messages"] | {"stream": stream}
            asking = asyncio.ensure_future(http.post("/v1/messages", json=body))
            await write(broker, await claim_one(broker), 0, 72, 105, end=FinishReason.STOP)
            answer = await asking
            assert "Hi" in answer.text
            assert POSITION_HEADER not in answer.headers
    assert statuses == []
