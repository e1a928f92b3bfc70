"""Creating responses: checked, put on record, and run in the foreground or in the background."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ....shared.connection import CommandConnection
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.shown import shown
from ...client import Client
from ...inputs.options import RequestOptions
from ...webhooks.event_records import EventFamily
from ..errors import OpenAIError, bad_field
from ..parsers import ModelParsers
from .body import ResponseBody, check_body
from .events import Event
from .items import Item
from .kept import KeptResponses
from .objects import Response
from .prepared import PreparedResponse, prepare_response
from .reading import read_items
from .record import StoredResponse
from .response_store import MAX_RUN_S
from .transcriber import Transcriber


class Responses(KeptResponses):
    """All that the Responses API does, for one tenant each time.

    Args:
        client: runs them.
        commands: reads and writes what is kept of them.
        parsers: which ones read the answers of each model.
        result_ttl_s: the client's.
        linger_s: how long a stream that was cut goes on for somebody to follow it.
        fail_fast: of all requests.
        status_wait_s: so long a stream waits for its first token, or for what is wrong with the request, before it
            begins.
    """

    def __init__(
        self,
        client: Client,
        commands: CommandConnection,
        keys: Keys,
        parsers: ModelParsers,
        *,
        result_ttl_s: float,
        linger_s: float = 0.0,
        fail_fast: bool = False,
        status_wait_s: float = 0.5,
    ) -> None:
        super().__init__(client, commands, keys, result_ttl_s=result_ttl_s, linger_s=linger_s)
        self._fail_fast, self._status_wait_s = fail_fast, status_wait_s
        self._parsers = parsers

    async def prepare(self, tenant: str, body: ResponseBody, *, band: str | None = None) -> PreparedResponse:
        """Return what a body asks for, with the conversation that it goes on with; nothing is enqueued yet.

        Args:
            band: of the request, if the body names none.

        Raises:
            OpenAIError: 400, a field is wrong; 404, the previous response is unknown or has expired.
            UnknownModelError: no worker has ever served the model.
        """
        check_body(body)
        response_id = f"resp_{os.urandom(16).hex()}"
        items = read_items(body.input, response_id)
        history = await self._history(tenant, body)
        model, adapter = await self._client.find_model(body.model, tenant=tenant)
        record = StoredResponse(
            id=response_id,
            created_at=int(time.time()),
            model=model,
            body=msgspec.structs.replace(body, input=None),
            history=history,
            items=items,
            parsers=await self._parsers.find(model),
        )
        prepared = prepare_response(record)
        given = prepared.chat.options
        timeout_s = given.get("timeout_s")
        ours = RequestOptions(
            model=model,
            lora_request=adapter,
            request_id=response_id,
            tenant=tenant,
            band=given.get("band") or band,
            fail_fast=self._fail_fast,
            timeout_s=MAX_RUN_S if timeout_s is None else min(timeout_s, MAX_RUN_S),
        )
        if body.webhook_url is not None:
            ours["webhook_url"], ours["webhook_events"] = body.webhook_url, EventFamily.RESPONSE
        return msgspec.structs.replace(prepared, options={**given, **ours})

    async def answer(self, prepared: PreparedResponse) -> Response:
        """Run it and return the whole response. Cancelling the awaiting task cancels it.

        Raises: as ``Client.generate``, with the names that fields have here.
        """
        transcriber = prepared.transcriber()
        transcriber.create()
        try:
            async with aclosing(self._run(prepared, transcriber)) as batches:
                async for _ in batches:
                    pass
        except PenstockError:
            await self._store.delete(prepared.tenant, prepared.record.id)  # nobody knows of it
            raise
        return transcriber.response

    async def stream(self, prepared: PreparedResponse) -> AsyncGenerator[list[Event]]:
        """Run it and iterate over its events, those that come together in one list.

        Leaving early cancels it, after ``linger_s`` in which anybody may follow it.

        Raises: as ``answer``, within ``status_wait_s`` and before there was output; what goes wrong later is told by
            the last event, ``response.failed``.
        """
        transcriber = prepared.transcriber()
        created = transcriber.create()
        async with aclosing(self._run(prepared, transcriber, linger_s=self._linger_s)) as batches:
            first = asyncio.ensure_future(anext(batches))
            try:
                await asyncio.wait([first], timeout=self._status_wait_s)
                if not first.done():
                    yield created
                    created = []
                begun, created = created + await first, []
                yield begun
                async for events in batches:
                    yield events
            except PenstockError as error:
                if created:
                    await self._store.delete(prepared.tenant, prepared.record.id)  # nobody knows of it
                    raise
                yield transcriber.fail(error)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def submit(self, prepared: PreparedResponse) -> Response:
        """Put it in line to run without anyone listening, and return it as it is then.

        Raises: as ``Client.submit``.
        """
        record, tenant = prepared.record, prepared.tenant
        await self._store.put(tenant, record)
        try:
            await self._client.submit(prepared.chat.prompt, prepared.chat.params, **prepared.options)
        except PenstockError as error:
            await self._store.delete(tenant, record.id)
            raise prepared.name_fields(error) from error
        transcriber = prepared.transcriber()
        transcriber.create()
        return transcriber.response

    async def _run(
        self, prepared: PreparedResponse, transcriber: Transcriber, *, linger_s: float = 0.0
    ) -> AsyncGenerator[list[Event]]:
        """Run it in the foreground."""
        record, tenant, options = prepared.record, prepared.tenant, prepared.options
        if record.body.is_stored:
            await self._store.put(tenant, record)
            options["linger_s"] = linger_s
        deltas = self._client.stream(prepared.chat.prompt, prepared.chat.params, **options)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield transcriber.take(delta)
        except PenstockError as error:
            raise prepared.name_fields(error) from error
        finally:
            if record.body.is_stored:
                await self._store.ended(tenant, record.id)

    async def _history(self, tenant: str, body: ResponseBody) -> list[Item]:
        """Return all items of the conversation that the body goes on with."""
        previous_id = body.previous_response_id
        if previous_id is None:
            return []
        try:
            record, response = await self.read(tenant, previous_id)
        except OpenAIError as error:
            if error.status != 404:
                raise
            raise OpenAIError(
                404,
                f"previous_response_id {shown(previous_id)} is unknown or has expired; send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        if response.status not in ("completed", "incomplete"):
            raise bad_field(
                "previous_response_id",
                f"previous_response_id {shown(previous_id)} has status {shown(response.status)}; "
                "only what is completed or incomplete can be gone on with",
            )
        return [*record.history, *record.items, *response.output]
