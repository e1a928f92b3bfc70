"""The load of the row gateway, in its own process: the same requests through the client, or over HTTP to the gateway.

    python -m penstock.ops.lab.bench.engines.gateway_load client redis://… phases.json result.json
    python -m penstock.ops.lab.bench.engines.gateway_load http http://127.0.0.1:8000 phases.json result.json

Over HTTP it does as little as possible during the measurement: it sends prepared requests, records the time of each
first event, and stores the bytes, which are parsed afterwards. An HTTP library would cost more than the measured part.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from .....producer import Client, SamplingParams
from .....shared.errors import BrokerError
from ..workload import Item, Phase

CLIENT, HTTP = "client", "http"
_DATA = b"data: "


class LoadResult(msgspec.Struct, kw_only=True):
    """Results of one phase: times in milliseconds and texts by request; ``cpu_s`` is the CPU time of the load."""

    wall_s: float
    cpu_s: float
    num_tokens: int
    ttft_ms: list[float]
    texts: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


class Usage(msgspec.Struct):
    completion_tokens: int


class Choice(msgspec.Struct):
    text: str


class Chunk(msgspec.Struct):
    """Parsed part of an event."""

    choices: list[Choice]
    usage: Usage | None = None


class HttpStream(asyncio.Protocol):
    """A request on its own connection; ``done`` is set when the server has closed it."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_at = 0.0
        self._pieces: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        if not self.first_at and _DATA in data:
            self.first_at = time.perf_counter()
        self._pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def read(self) -> tuple[str, int]:
        """Text and number of tokens of the answer.

        Raises:
            BrokerError: it was no stream, or one without an end.
        """
        reply = b"".join(self._pieces)
        head, _, body = reply.partition(b"\r\n\r\n")
        # Each event is a chunk of the body, so no line of one is torn.
        lines = [line[len(_DATA) :] for line in body.split(b"\n") if line.startswith(_DATA)]
        if not head.startswith(b"HTTP/1.1 200") or not lines or lines.pop().strip() != b"[DONE]":
            raise BrokerError(f"the gateway did not stream: {reply[:500]!r}")
        chunks = [msgspec.json.decode(line, type=Chunk) for line in lines]
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        return "".join(choice.text for chunk in chunks for choice in chunk.choices), counts[-1] if counts else 0


def http_request(item: Item) -> bytes:
    """Return the bytes of a completion request for ``item``."""
    body = msgspec.json.encode(
        {
            "model": "bench",
            "prompt": item.prompt_token_ids,
            "temperature": 0.0,
            "max_tokens": item.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def load_http(address: str, phase: Phase) -> LoadResult:
    """Send the requests of a phase, those of one at a time after each other; connections are open before."""
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(HttpStream, parts.hostname, parts.port) for _ in phase.items]
    requests = [http_request(item) for item in phase.items]
    sent_at = [0.0] * len(requests)
    started, cpu_started = time.perf_counter(), time.process_time()
    for i, (transport, stream) in enumerate(pairs):
        sent_at[i] = time.perf_counter()
        transport.write(requests[i])
        if phase.concurrency == 1:
            await stream.done
    await asyncio.gather(*(stream.done for _, stream in pairs))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    answers = [stream.read() for _, stream in pairs]
    return LoadResult(
        wall_s=wall_s,
        cpu_s=cpu_s,
        num_tokens=sum(num_tokens for _, num_tokens in answers),
        ttft_ms=[1000 * (stream.first_at - at) for (_, stream), at in zip(pairs, sent_at, strict=True)],
        texts=[text for text, _ in answers],
    )


async def load_client(client: Client, phase: Phase) -> LoadResult:
    """Run a phase through the client's streams."""
    texts = [""] * len(phase.items)
    ttft_ms = [0.0] * len(phase.items)
    num_tokens = 0

    async def one(i: int, item: Item) -> None:
        nonlocal num_tokens
        sent_at = time.perf_counter()
        async for delta in client.stream(item.prompt_token_ids, SamplingParams(**item.sampling())):
            if not ttft_ms[i]:
                ttft_ms[i] = 1000 * (time.perf_counter() - sent_at)
            texts[i] += delta.text
            num_tokens += len(delta.token_ids)

    started, cpu_started = time.perf_counter(), time.process_time()
    if phase.concurrency == 1:
        for i, item in enumerate(phase.items):
            await one(i, item)
    else:
        await asyncio.gather(*(one(i, item) for i, item in enumerate(phase.items)))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    return LoadResult(wall_s=wall_s, cpu_s=cpu_s, num_tokens=num_tokens, ttft_ms=ttft_ms, texts=texts)


async def _main(way: str, url: str, phases_path: Path, result_path: Path) -> None:
    phases = msgspec.json.decode(phases_path.read_bytes(), type=list[Phase])  # noqa: ASYNC240  # before all else
    if way == HTTP:
        results = [await load_http(url, phase) for phase in phases]
    else:
        async with Client.connect(url) as client:
            results = [await load_client(client, phase) for phase in phases]
    result_path.write_bytes(msgspec.json.encode(results))  # noqa: ASYNC240  # all is over


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])))
