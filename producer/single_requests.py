"""Requests with one answer, as the broker knows them; one for ``n`` answers is ``n`` of these (see ``fan_out``)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence

from ..shared.broker import NEW, UNSERVED, Broker
from ..shared.connection import CommandConnection, Subscriber
from ..shared.errors import PenstockError
from ..shared.keys import Keys
from ..shared.messages import Delta, EngineCoreRequest
from .health import Health
from .lease import ClientLease, InteractiveRequest
from .prompt import RequestOptions, encode_request
from .reader import DeltaReader, checked


class SingleRequests:
    """Enqueues single requests, detached or as long as somebody listens here, and follows them.

    ``is_open`` says whether the connections are; the client sets it.
    """

    def __init__(
        self,
        commands: CommandConnection,
        subscriber: Subscriber,
        keys: Keys,
        health: Health,
        lease: ClientLease,
        *,
        result_ttl_ms: int,
        fail_fast: bool,
        max_payload_bytes: int,
    ) -> None:
        self.is_open = False
        self._commands = commands
        self._subscriber = subscriber
        self._keys = keys
        self._health = health
        self._lease = lease
        self._result_ttl_ms = result_ttl_ms
        self._fail_fast = fail_fast
        self._max_payload_bytes = max_payload_bytes
        self._brokers: dict[str, Broker] = {}

    def broker(self, model: str) -> Broker:
        """Return the broker of one model."""
        broker = self._brokers.get(model)
        if broker is None:
            broker = self._brokers[model] = Broker(self._commands, self._keys.model(model))
        return broker

    async def run(self, request: EngineCoreRequest, options: RequestOptions) -> AsyncGenerator[Delta]:
        """Enqueue an interactive request and follow it; leaving early cancels it."""
        broker = self.broker(request.model)
        reader = DeltaReader(broker, self._subscriber, request.request_id)
        interactive: InteractiveRequest | None = None
        try:
            await reader.subscribe()
            enqueueing = asyncio.create_task(self._enqueue(request, options, client_id=self._lease.client_id))
            interactive = InteractiveRequest(broker, request.request_id, enqueueing)
            self._lease.hold(interactive)
            with self._health.watching(request.model):
                is_ours = await interactive.is_ours()
                if not is_ours:
                    self._lease.let_go(interactive)
                    reader.catch_up()
                async for delta in checked(reader):
                    if is_ours and delta.token_ids:
                        self._health.saw_alive(request.model)
                    yield delta
        finally:
            reader.close()
            if interactive is not None:
                if not reader.ended and self.is_open:
                    await interactive.leave()
                self._lease.let_go(interactive)

    async def follow(self, model: str, request_id: str, after: int = -1) -> AsyncGenerator[Delta]:
        """Iterate over the deltas of a request that is already enqueued; leaving early cancels nothing."""
        reader = DeltaReader(self.broker(model), self._subscriber, request_id, after)
        try:
            await reader.subscribe()
            reader.catch_up()
            with self._health.watching(model):
                async for delta in checked(reader):
                    yield delta
        finally:
            reader.close()

    async def submit(self, requests: Sequence[EngineCoreRequest], options: RequestOptions) -> None:
        """Enqueue detached requests of one model; if that fails for one, those that were made are cancelled."""
        model = requests[0].model
        with self._health.watching(model):
            calls = (self._enqueue(request, options) for request in requests)
            results = await asyncio.gather(*calls, return_exceptions=True)
            error = next((result for result in results if isinstance(result, BaseException)), None)
            if error is None:
                return
            with contextlib.suppress(PenstockError):
                for request, is_new in zip(requests, results, strict=True):
                    if is_new is True:
                        await self.broker(model).cancel(request.request_id)
            raise error

    def check_sizes(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Refuse all of several requests if one is too large; a single one is refused when it is enqueued.

        Raises: as ``encode_request``.
        """
        if len(requests) > 1:
            for request in requests:
                encode_request(request, self._max_payload_bytes)

    async def _enqueue(self, request: EngineCoreRequest, options: RequestOptions, *, client_id: str = "") -> bool:
        """Enqueue a request, detached without a ``client_id``; returns whether it is new, or its id was known."""
        fail_fast = options.get("fail_fast")
        state = await self.broker(request.model).enqueue(
            request.request_id,
            encode_request(request, self._max_payload_bytes),
            result_ttl_ms=self._result_ttl_ms,
            client_id=client_id,
            client_ttl_ms=self._lease.ttl_ms,
            fail_fast=self._fail_fast if fail_fast is None else fail_fast,
            call=secrets.token_hex(8),
        )
        if state == UNSERVED:
            raise await self._health.unserved(request.model)
        return state == NEW
