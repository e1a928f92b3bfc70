"""Create responses: check, store, and run them in the foreground or in the background."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ....shared.connection import CommandConnection
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.values.shown import shown
from ...client import Client
from ...inputs.options import REPEAT_LINGER_S, RequestOptions
from ...webhooks.events import EventFamily
from ..errors import OpenAIError, bad_field
from ..parsers import ModelParsers
from .body import ResponseBody, check_body
from .items import Item, read_items, referenced_ids, response_of_item
from .objects import Event, Response
from .prepared import PreparedResponse, prepare_response
from .response_store import MAX_RUN_S, StoredResponse
from .stored_responses import StoredResponses
from .transcriber import Transcriber


class Responses(StoredResponses):
    """The operations of the Responses API; each is on behalf of one tenant.

    Args:
        client: runs the requests.
        commands: reads and writes the records.
        parsers: selects the parsers of each model's answers.
        result_ttl_s: the client's.
        linger_s: how long the request of a cut stream keeps running for a reader that follows it.
        fail_fast: whether requests fail immediately while no engine serves their model.
        status_wait_s: how long a stream waits for its first token or an error before it starts.
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

    async def prepare(
        self,
        tenant: str,
        body: ResponseBody,
        *,
        band: str | None = None,
        key_name: str = "",
        reserved: tuple[str, int] | None = None,
    ) -> PreparedResponse:
        """Check a body and read the conversation that it continues. Nothing is enqueued yet.

        Args:
            band: band of the request if the body names none.
            key_name: name of the caller's API key.
            reserved: id and creation time, if another call with the same key may create or read the same response.

        Raises:
            OpenAIError: 400, a field is invalid; 404, the previous response is unknown or has expired.
            UnknownModelError: no worker has ever served the model.
        """
        check_body(body)
        response_id, created_at = reserved or (f"resp_{os.urandom(16).hex()}", int(time.time()))
        items = read_items(body.input, response_id, await self._referenced(tenant, body.input))
        history = await self._history(tenant, body)
        model, adapter = await self._client.find_model(body.model, tenant=tenant)
        record = StoredResponse(
            id=response_id,
            created_at=created_at,
            model=model,
            body=msgspec.structs.replace(body, input=None),
            history=history,
            items=items,
            parsers=await self._parsers.for_model(model),
        )
        prepared = prepare_response(record)
        body_options = prepared.chat.options
        timeout_s = body_options.get("timeout_s")
        options = RequestOptions(
            model=model,
            lora_request=adapter,
            request_id=response_id,
            tenant=tenant,
            band=body_options.get("band") or band,
            key_name=key_name,
            fail_fast=self._fail_fast,
            timeout_s=MAX_RUN_S if timeout_s is None else min(timeout_s, MAX_RUN_S),
        )
        if body.webhook_url is not None:
            options["webhook_url"], options["webhook_events"] = body.webhook_url, EventFamily.RESPONSE
        return msgspec.structs.replace(prepared, options={**body_options, **options}, is_reserved=reserved is not None)

    async def answer(self, prepared: PreparedResponse) -> Response:
        """Run the request and return the whole response. Cancelling the task cancels the request.

        Raises: as ``Client.generate``, with the field names of a response's body.
        """
        transcriber = prepared.transcriber()
        transcriber.create()
        try:
            linger_s = self._linger_s if prepared.is_reserved else 0.0
            async with aclosing(self._run_in_foreground(prepared, transcriber, linger_s=linger_s)) as batches:
                async for _ in batches:
                    pass
        except PenstockError:
            await self._drop(prepared)
            raise
        return transcriber.response

    async def stream(self, prepared: PreparedResponse) -> AsyncGenerator[list[Event]]:
        """Run the request and iterate over its events; those that arrive together form one list.

        Leaving early cancels it after ``linger_s``, during which any reader may follow it.

        Raises: as ``answer``, within ``status_wait_s`` and before there was output. Later errors are reported by the
        last event, ``response.failed``.
        """
        transcriber = prepared.transcriber()
        created = transcriber.create()
        async with aclosing(self._run_in_foreground(prepared, transcriber, linger_s=self._linger_s)) as batches:
            first = asyncio.ensure_future(anext(batches))
            try:
                await asyncio.wait([first], timeout=self._status_wait_s)
                if not first.done():
                    yield created
                    created = []
                first_events, created = created + await first, []
                yield first_events
                async for events in batches:
                    yield events
            except PenstockError as error:
                if created:
                    await self._drop(prepared)
                    raise
                yield transcriber.fail(error)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def submit(self, prepared: PreparedResponse) -> Response:
        """Enqueue the request to run in the background, and return the queued response.

        Raises: as ``Client.submit``.
        """
        record, tenant = prepared.record, prepared.tenant
        await self._store.put(tenant, record)
        try:
            await self._client.submit(prepared.chat.prompt, prepared.chat.params, **prepared.options)
        except PenstockError as error:
            await self._drop(prepared)
            raise prepared.name_fields(error) from error
        if prepared.is_reserved:
            return await self.retrieve(tenant, record.id)
        transcriber = prepared.transcriber()
        transcriber.create()
        return transcriber.response

    async def _drop(self, prepared: PreparedResponse) -> None:
        """Delete the record of a response whose id was never returned; a reserved one may belong to another call."""
        if not prepared.is_reserved:
            await self._store.delete(prepared.tenant, prepared.record.id)

    async def _run_in_foreground(
        self, prepared: PreparedResponse, transcriber: Transcriber, *, linger_s: float = 0.0
    ) -> AsyncGenerator[list[Event]]:
        """Run the request in the foreground."""
        record, tenant, options = prepared.record, prepared.tenant, prepared.options
        if record.body.is_stored:
            await self._store.put(tenant, record)
        if record.body.is_stored or prepared.is_reserved:
            options["linger_s"] = max(linger_s, REPEAT_LINGER_S) if prepared.is_reserved else linger_s
        deltas = self._client.stream(prepared.chat.prompt, prepared.chat.params, **options)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield transcriber.feed(delta)
        except PenstockError as error:
            raise prepared.name_fields(error) from error
        finally:
            if record.body.is_stored:
                await self._store.shorten_ttl(tenant, record.id)

    async def _referenced(self, tenant: str, value: str | list[Any] | None) -> dict[str, Item]:
        """Return the items of stored responses that an input refers to, by id. Unknown ones are left out."""
        responses: dict[str, list[Item]] = {}
        ids = referenced_ids(value)
        for response_id in filter(None, map(response_of_item, ids)):
            if response_id not in responses:
                try:
                    record, response = await self.read_with_record(tenant, response_id)
                except OpenAIError as error:
                    if error.status != 404:
                        raise
                    responses[response_id] = []
                else:
                    responses[response_id] = [*record.conversation, *response.output]
        return {item.id: item for items in responses.values() for item in items if item.id in ids}

    async def _history(self, tenant: str, body: ResponseBody) -> list[Item]:
        """Return all items of the conversation that the body continues."""
        previous_id = body.previous_response_id
        if previous_id is None:
            return []
        try:
            record, response = await self.read_with_record(tenant, previous_id)
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
                "only a completed or incomplete response can be continued",
            )
        return [*record.conversation, *response.output]
