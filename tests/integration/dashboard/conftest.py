"""The pages as an application in this process, over requests that the tests' own broker calls have made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from penstock.ops.dashboard import Access, Resolve, Role, dashboard, everybody
from penstock.producer.inputs.prompt import build_request, encode_request
from penstock.shared.broker import Broker, EngineCapacity, Queue, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause, EngineHeartbeat, EngineSetup, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.supervision import EngineState
from penstock.shared.params.sampling import SamplingParams

ADMIN = Access("ann", Role.ADMIN, sees_contents=True)
HTML = {"accept": "text/html"}
SETUP = EngineSetup(max_num_seqs=7, block_size=16, processor="Some Processor", instructions=["amx_bf16"])
CAUSE = DeathCause(engine_id="host-1-0", reason="killed by signal 11", last_step=42, trace="Traceback: <i>x</i>")


class Site:
    """A dashboard, and the deployment it shows: the model ``m`` with one engine."""

    def __init__(self, url: str, namespace: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.keys = Keys(namespace)
        self.connection = CommandConnection(url)
        self.broker = Broker(self.connection, self.keys.model("m"))
        self.queue = Queue(self.connection, self.keys.model("m"))
        self._stack = stack

    async def register(self, model: str = "m", **fields: Any) -> None:
        """Register it as a worker would."""
        card = msgspec.json.encode(ModelCard(model=model))
        await self.connection.execute("HSET", self.keys.models(), model, card)
        beat = EngineHeartbeat(
            worker_id="host-1",
            engine_id="host-1-0",
            setup=SETUP,
            model=model,
            state=EngineState.READY,
            host="host",
            worker_pid=1,
            core_pid=2,
        )
        beat = msgspec.structs.replace(beat, **fields)
        await self.connection.execute("SET", self.keys.engine("host-1-0"), msgspec.json.encode(beat))
        await self.connection.execute("SADD", self.keys.engines(), "host-1-0")

    async def enqueue(self, request_id: str, prompt: str = "hello", **options: Any) -> None:
        params = SamplingParams(max_tokens=7, temperature=0.5)
        request = build_request(prompt, params, card=ModelCard(model="m"), options={"request_id": request_id})
        await self.broker.enqueue(request_id, encode_request(request), result_ttl_ms=60_000, **options)

    async def claim(self) -> list[str]:
        return [
            one.request_id for one in (await self.broker.claim("host-1-0", EngineCapacity(max_num_seqs=100))).claims
        ]

    async def append(self, request_id: str, epoch: int, delta: Delta) -> None:
        """Append as the engine that holds it."""
        assert await self.broker.append([Record(request_id, epoch, delta)]) == []

    async def park(self, request_id: str, prompt: str = "hello") -> None:
        """Let an engine die on it, which is enough here."""
        await self.enqueue(request_id, prompt)
        await self.claim()
        await self.broker.reclaim("host-1-0", CAUSE, is_external=False, max_deliveries=1)

    async def app(self, access: Resolve | None, **options: Any) -> Starlette:
        app = dashboard(self.url, access=access, namespace=self.keys.namespace, **options)
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        return app

    async def visitor(
        self, access: Access | Resolve | None = ADMIN, app: Starlette | None = None, **options: Any
    ) -> httpx.AsyncClient:
        """Somebody with a browser's headers."""
        if app is None:
            app = await self.app(everybody(access) if isinstance(access, Access) else access, **options)
        headers = {**HTML, "sec-fetch-site": "same-origin"}
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)
        return await self._stack.enter_async_context(client)


@pytest.fixture
async def site(redis_url: str, namespace: str) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        site = Site(redis_url, namespace, stack)
        stack.push_async_callback(site.connection.close)
        await site.register()
        yield site
