"""Gateways that are killed in the middle of streams: whoever asks again gets the rest, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from penstock.ops.local.server import LocalGateway
from penstock.producer import Client

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start

NUM_TOKENS = 80
# One answer or three; a caller reads this many events, then loses its gateway.
BODIES: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"count from {word} to nine:"}],
        "temperature": 1.3,
        "seed": seed,
        "n": 3 if seed % 3 == 0 else 1,
        "ignore_eos": True,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for seed, word in enumerate(["one", "two", "three", "four", "five", "six"])
]


class Reader:
    """Reader of one stream through any gateway; it continues after its last event when that gateway is gone."""

    def __init__(self, body: dict[str, Any], gateways: list[LocalGateway]) -> None:
        self._body = body
        self._gateways = gateways
        self.texts = [""] * body["n"]
        self.ids: list[str] = []
        self.usage: Any = None
        self.num_resumed = 0

    async def read(self) -> None:
        attempt, is_done = 0, False
        while not is_done:
            gateway = self._gateways[attempt % len(self._gateways)]
            attempt += 1
            try:
                is_done = await self._read_from(gateway)
            except httpx.TransportError:
                await asyncio.sleep(0.05)

    async def _read_from(self, gateway: LocalGateway) -> bool:
        headers = {"Last-Event-ID": self.ids[-1]} if self.ids else {}
        async with (
            httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http,
            http.stream("POST", "/chat/completions", json=self._body, headers=headers) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            self.num_resumed += bool(headers)
            return await self._take_all(answer)

    async def _take_all(self, answer: httpx.Response) -> bool:
        event_id = ""
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return True
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
                self.ids.append(event_id)
        return False

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            self.texts[choice["index"]] += choice["delta"].get("content", "")
        self.usage = chunk["usage"] or self.usage


async def test_streams_resume_when_their_gateways_are_killed_and_restarted(
    start: Start, gate: Gate, tmp_path: Path
) -> None:
    """Six streams over two gateways, both of which are killed with -9 in the middle of all; one engine serves on."""
    stack = await start(1, "--deterministic")
    options = ["--reconnect-grace", "60", "--lease-ttl", "60"]
    gateways = [LocalGateway(stack.url, options, tmp_path / f"gateway-{i}.log") for i in range(2)]
    async with Client.connect(stack.url) as client:
        try:
            await asyncio.gather(*(asyncio.to_thread(gateway.start) for gateway in gateways))
            expected = await asyncio.gather(*(undisturbed(gateways[0], body) for body in BODIES))
            gate.hold_at(NUM_TOKENS - 1)
            readers = [Reader(body, gateways[i % 2 :] + gateways[: i % 2]) for i, body in enumerate(BODIES)]
            tasks = [asyncio.create_task(reader.read()) for reader in readers]
            async with asyncio.timeout(DEADLINE_S):
                while not all(reader.ids for reader in readers):
                    await asyncio.sleep(0.01)
            # Half of the streams move to the second gateway, and then all are cut at once.
            await asyncio.to_thread(gateways[0].kill)
            async with asyncio.timeout(DEADLINE_S):
                while sum(reader.num_resumed for reader in readers) < 3:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(gateways[1].kill)
            gate.open()
            await asyncio.gather(*(asyncio.to_thread(gateway.start) for gateway in gateways))
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*tasks)
        finally:
            for gateway in gateways:
                await asyncio.to_thread(gateway.stop)
        states = {(await client.status(reader.ids[0].partition(":")[0])).state for reader in readers}
    assert states == {"finished"}
    for reader, body, texts in zip(readers, BODIES, expected, strict=True):
        assert reader.texts == texts
        assert len(set(reader.ids)) == len(reader.ids)
        assert reader.usage["completion_tokens"] == NUM_TOKENS * body["n"]
    assert min(reader.num_resumed for reader in readers) >= 1


async def undisturbed(gateway: LocalGateway, body: dict[str, Any]) -> list[str]:
    """Return the answers to ``body`` without a disturbance."""
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=DEADLINE_S) as http:
        whole = {name: value for name, value in body.items() if not name.startswith("stream")}
        answer = (await http.post("/chat/completions", json=whole)).json()
    return [choice["message"]["content"] for choice in answer["choices"]]
