"""Stored responses: retrieve, follow, cancel and delete them, no matter which process created them.

A response is one request with the same id, and a record of its body, written before the request is enqueued. Nothing
else is stored: each reader derives the response and its events from the request's log, so any process can continue
where another stopped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from ....shared.broker import Broker
from ....shared.connection import CommandConnection
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.partitions import Layouts, PartitionedBroker
from ....shared.queue.lifecycle import RequestState
from ....shared.values.shown import shown
from ...client import Client
from ..errors import OpenAIError, bad_field
from .objects import ENDED, DeletedResponse, Event, ItemList, Response
from .prepared import prepare_response
from .response_store import ResponseStore, StoredResponse

MAX_PAGE = 100


class StoredResponses:
    """See ``Responses``."""

    def __init__(
        self, client: Client, commands: CommandConnection, keys: Keys, *, result_ttl_s: float, linger_s: float
    ) -> None:
        self._client = client
        self._commands = commands
        self._keys = keys
        self._layouts = Layouts(commands, keys)
        self._store = ResponseStore(commands, keys, result_ttl_s=result_ttl_s)
        self._linger_s = linger_s

    async def retrieve(self, tenant: str, response_id: str) -> Response:
        """Return a response in its current state.

        Raises:
            OpenAIError: 404, the tenant has no response with this id, or it has expired.
        """
        return (await self.read_with_record(tenant, response_id))[1]

    async def find(self, tenant: str, response_id: str) -> tuple[StoredResponse, RequestState]:
        """Return a record and the state of its request.

        Raises: as ``retrieve``.
        """
        record = await self._store.get(tenant, response_id)
        if record is not None:
            state = await (await self._broker(record)).state(record.id)
            if state is not None:
                return record, state
            await self._store.delete(tenant, response_id)
        message = f"response {shown(response_id)} is unknown or has expired"
        raise OpenAIError(404, message, param="response_id", code="response_not_found")

    async def follow(self, tenant: str, record: StoredResponse, after: int = -1) -> AsyncGenerator[list[Event]]:
        """Iterate over the events after number ``after`` (-1 for all) of a response that runs or has ended.

        Any number of readers may follow it, from any process. Leaving early cancels nothing.
        """
        transcriber = prepare_response(record).transcriber(after)
        yield transcriber.create()
        handle = await self._client.handle(record.id, model=record.model)
        linger_s = None if record.body.background else self._linger_s or None
        async with aclosing(handle.stream(linger_s=linger_s)) as deltas:
            try:
                async for delta in deltas:
                    yield transcriber.feed(delta)
            except PenstockError as error:
                yield transcriber.fail(error)
        await self._store.shorten_ttl(tenant, record.id)

    async def cancel(self, tenant: str, response_id: str) -> Response:
        """Cancel a background response and return it. Has no effect after its end.

        Raises:
            OpenAIError: 404 as ``retrieve``; 400, it does not run in the background.
        """
        record, response = await self.read_with_record(tenant, response_id)
        if not record.body.background:
            raise bad_field(
                "response_id",
                f"response {shown(response_id)} was not created with background=true; close its connection to cancel "
                "it",
            )
        if response.status in ENDED:
            return response
        await self._client.cancel(record.id, model=record.model)
        return await self.retrieve(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> DeletedResponse:
        """Cancel a response if it runs, and delete it. Responses that continue it keep its text in their records.

        Raises: as ``retrieve``.
        """
        record, _ = await self.find(tenant, response_id)
        await self._store.delete(tenant, response_id)
        broker = await self._broker(record)
        await broker.cancel(record.id)
        await broker.forget(record.id)
        return DeletedResponse(response_id)

    async def input_items(
        self, tenant: str, response_id: str, *, after: str | None = None, limit: int = 20, order: str = "desc"
    ) -> ItemList:
        """Return a page of the input items of the response's own request, those after item ``after``.

        Raises:
            OpenAIError: 404 as ``retrieve``; 400, ``after`` is not one of them, or a value is out of range.
        """
        if not 1 <= limit <= MAX_PAGE:
            raise bad_field("limit", f"limit must be in [1, {MAX_PAGE}], got {limit}")
        if order not in ("asc", "desc"):
            raise bad_field("order", f"order must be 'asc' or 'desc', got {shown(order)}")
        record, _ = await self.find(tenant, response_id)
        items = record.items if order == "asc" else record.items[::-1]
        ids = [item.id for item in items]
        if after is not None and after not in ids:
            raise bad_field("after", f"after must be the id of an input item of the response, got {shown(after)}")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + limit]
        return ItemList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=first + limit < len(items),
        )

    async def read_with_record(self, tenant: str, response_id: str) -> tuple[StoredResponse, Response]:
        """Return a record, and the response according to its request's log at present.

        Raises: as ``retrieve``.
        """
        record, state = await self.find(tenant, response_id)
        transcriber = prepare_response(record).transcriber()
        transcriber.create()
        if state is RequestState.CLAIMED:
            transcriber.start()
        # Read after the state, so the log has at least the tokens that the state implies.
        for delta in await (await self._broker(record)).read_log(record.id):
            transcriber.feed(delta)
        response = transcriber.response
        if response.status in ENDED:
            await self._store.shorten_ttl(tenant, response_id)
        return record, response

    async def _broker(self, record: StoredResponse) -> Broker:
        return await PartitionedBroker(self._commands, self._keys, record.model, self._layouts).find(record.id)
