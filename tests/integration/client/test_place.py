"""The place of a waiting request: headers and comments of the gateway, with an engine that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError

from penstock.producer import Client
from penstock.producer.gateway.place import POSITION_HEADER, START_HEADER, STATE_HEADER, Place
from penstock.producer.openai.errors import OpenAIError
from penstock.producer.sse import COMMENT
from penstock.shared.broker import Broker, EngineCapacity, Homes
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ModelTooLargeError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.stats import ModelState, RequestStatus
from penstock.shared.swap.views import SleepLevel

from ..conftest import LONG_MS
from .harness import claim_one, serve_gateway, until, write

MESSAGES: Any = [{"role": "user", "content": "hi"}]
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
    assert status.readiness is not None
    start = "" if status.estimated_start_s is None else f" {START_HEADER}={status.estimated_start_s:.1f}"
    state = status.readiness.state
    words = f": model m is not loaded, position {status.position}\n" if state is ModelState.UNLOADED else ""
    return f": {POSITION_HEADER}={status.position} {STATE_HEADER}={state}{start}\n{words}".encode()


async def test_comments_follow_the_queue_until_the_start(
    client: Client, broker: Broker, statuses: list[RequestStatus]
) -> None:
    for request_id in ("a", "b", "c", "own"):
        await client.submit("hi", request_id=request_id)
    place = Place(client, None, "own", wait_s=0.001, every_s=0.01)
    pieces = place.around(texts((await client.handle("own")).stream()))
    assert await anext(pieces) == comment_of(statuses[-1])
    # No engine has claimed yet, so the start is unknown.
    assert place.headers == {POSITION_HEADER: "3", STATE_HEADER: "unloaded"}
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
    assert place.headers == {POSITION_HEADER: "3", STATE_HEADER: "unloaded"}


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
    assert (await anext(pieces)).startswith(f": {POSITION_HEADER}=1 ".encode())
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
    assert (f": {POSITION_HEADER}=1 " in answer.text) == stream
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


@asynccontextmanager
async def openai_of(**settings: Any) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
    """Serve the gateway in this process, to the `openai` package and to a client that reads bytes."""
    async with serve_gateway(**settings) as http:
        transport: Any = http  # the package may have another version of httpx
        yield AsyncOpenAI(base_url="http://gateway/v1", api_key="any", max_retries=0, http_client=transport), http


async def test_clients_of_openai_wait_for_a_sleeping_model(
    client: Client,
    broker: Broker,
    commands: CommandConnection,
    statuses: list[RequestStatus],
    deployment: dict[str, str],
) -> None:
    """Its state, start and position are in headers and comments; the text is as if it had been loaded."""
    homes = Homes(commands, broker.keys)
    await homes.renew("gpu0", SleepLevel.HOST_MEMORY, 2.0, ready_in_s=0.0, num_seqs=8, lease_ttl_ms=LONG_MS)
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, "stream": True}
    async with openai_of(**deployment, status_wait_s=0.01, keep_alive_s=0.02) as (openai, http):
        asking = asyncio.ensure_future(openai.chat.completions.create(**body))
        reading = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))

        async def have_asked() -> bool:
            return len({status.request_id for status in statuses}) == 2

        await until(have_asked)
        for claim in (await broker.claim("e0", EngineCapacity(max_num_seqs=8))).claims:
            await write(broker, claim, 0, 72, 105, end=FinishReason.STOP)
        stream = await asking
        assert stream.response.headers[STATE_HEADER] == "asleep"
        assert stream.response.headers[START_HEADER] == "2.0"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hi"
        assert ": model m is asleep, about 2 s, position " in (await reading).text


async def test_clients_of_openai_hear_why_a_model_cannot_be_served(
    client: Client, broker: Broker, commands: CommandConnection, deployment: dict[str, str]
) -> None:
    homes = Homes(commands, broker.keys)
    error = ModelTooLargeError("m needs 41 GiB, device gpu0 has 36 GiB; lower max_model_len to 4096")

    async def is_waiting() -> bool:
        return (await client.queue_stats()).depth > 0

    async with openai_of(**deployment) as (openai, _):
        waiting = asyncio.ensure_future(openai.chat.completions.create(model="m", messages=MESSAGES))
        await until(is_waiting)
        await homes.renew("gpu0", SleepLevel.DISK, 2.0, error=error, lease_ttl_ms=LONG_MS)
        calls = (
            waiting,
            openai.chat.completions.create(model="m", messages=MESSAGES),
            openai.chat.completions.create(model="m", messages=MESSAGES, stream=True),
        )
        for call in calls:
            with pytest.raises(InternalServerError) as refusal:
                await call
            assert (refusal.value.status_code, refusal.value.code) == (503, "model_too_large")
            assert str(error) in refusal.value.message
