"""/v1/responses: the HTTP side of OpenAI's Responses API; its logic is in ``producer/openai/responses``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from ....shared.values.json_lines import encode_line
from ....shared.values.shown import shown
from ...openai.endpoints import RESPONSES, Decoded
from ...openai.errors import bad_field
from ...openai.responses.body import ResponseBody
from ...openai.responses.objects import DeletedResponse, Event, ItemList, Response
from ...sse import COMMENT, EventStream
from ..auth import Identity
from ..http import add_ids, bind_request_id, gateway_of, json_response, while_connected
from ..idempotency import reserved
from ..operations import Operation
from ..place import place_of
from ..reservations import Reservation
from ..stream import event_stream
from .generate import decode_body


async def create(request: Request) -> HTTPResponse | EventStream:
    """Answer POST /v1/responses."""
    gateway, identity = gateway_of(request), _identity(request)
    responses = gateway.responses
    decoded, _ = await decode_body(request, RESPONSES)
    body: ResponseBody = decoded.body
    reservation = await _reserved(request, decoded)
    reserved = None if reservation is None else (_id_of(reservation), reservation.created_at)
    prepared = await responses.prepare(
        identity.tenant, body, band=identity.band, key_name=identity.key_name, reserved=reserved
    )
    prompts = await gateway.images.fetched(prepared.chat.prompts, identity.tenant)
    prepared = msgspec.structs.replace(prepared, chat=msgspec.structs.replace(prepared.chat, prompts=prompts))
    add_ids(prepared.options, request, prepared.record.id)
    model, response_id = prepared.record.model, prepared.record.id
    if body.background:
        response = await responses.submit(prepared)
        if not body.stream:
            return json_response(response)
        frames = _frames(responses.follow(identity.tenant, prepared.record))
        return await event_stream(request, frames, model, response_id, has_preamble=True)
    if body.stream:
        return await event_stream(request, _frames(responses.stream(prepared)), model, response_id)
    place = place_of(request, model, response_id)
    return json_response(await while_connected(request, place.during(responses.answer(prepared))))


async def _reserved(request: Request, decoded: Decoded) -> Reservation | None:
    """Return the reservation of a body with an ``Idempotency-Key``; None without one."""
    resolve = partial(gateway_of(request).client.resolve_model, decoded.model)
    return await reserved(request, lambda reservation: [_id_of(reservation)], resolve)


def _id_of(reservation: Reservation) -> str:
    return f"resp_{reservation.seed}"


async def retrieve(request: Request) -> HTTPResponse | EventStream:
    """Answer GET /v1/responses/{response_id}; with stream=true as events."""
    responses, tenant = gateway_of(request).responses, _identity(request).tenant
    after = _number_parameter(request, "starting_after", request.headers.get("last-event-id"))
    if _is_true(request, "stream"):
        if after is not None:
            gateway_of(request).metrics.resumed.inc()
        record, _ = await responses.find(tenant, _response_id(request))
        events = responses.follow(tenant, record, -1 if after is None else after)
        return await event_stream(request, _frames(events), record.model, record.id, has_preamble=True)
    if "starting_after" in request.query_params:
        raise bad_field("starting_after", "starting_after needs stream=true")
    return json_response(await responses.retrieve(tenant, _response_id(request)))


async def cancel(request: Request) -> HTTPResponse:
    """Answer POST /v1/responses/{response_id}/cancel."""
    tenant = _identity(request).tenant
    return json_response(await gateway_of(request).responses.cancel(tenant, _response_id(request)))


async def delete(request: Request) -> HTTPResponse:
    """Answer DELETE /v1/responses/{response_id}."""
    tenant = _identity(request).tenant
    return json_response(await gateway_of(request).responses.delete(tenant, _response_id(request)))


async def input_items(request: Request) -> HTTPResponse:
    """Answer GET /v1/responses/{response_id}/input_items."""
    query = request.query_params
    page: dict[str, Any] = {name: query[name] for name in ("after", "order") if name in query}
    if (limit := _number_parameter(request, "limit")) is not None:
        page["limit"] = limit
    tenant = _identity(request).tenant
    return json_response(await gateway_of(request).responses.input_items(tenant, _response_id(request), **page))


async def _frames(batches: AsyncGenerator[list[Event]]) -> AsyncGenerator[bytes]:
    """Iterate over the encoded events; those that arrive together form one piece. The id of an event is its number."""
    has_sent = False
    async with aclosing(batches):
        async for events in batches:
            if events:
                has_sent = True
                yield b"".join(map(_frame, events))
    if not has_sent:
        yield COMMENT  # the reader already had all events


def _frame(event: Event) -> bytes:
    kind = str(event.__struct_config__.tag).encode()
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind, event.sequence_number, encode_line(event))


def _identity(request: Request) -> Identity:
    return request.state.identity


def _response_id(request: Request) -> str:
    response_id = request.path_params["response_id"]
    bind_request_id(response_id)
    return response_id


def _number_parameter(request: Request, name: str, default: str | None = None) -> int | None:
    text = request.query_params.get(name, default)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise bad_field(name, f"{name} must be a number, at least 0, got {shown(text)}")
    return int(text)


def _is_true(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false"):
        raise bad_field(name, f"{name} must be true or false, got {shown(text)}")
    return text == "true"


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


_COUNT = {"type": "integer", "minimum": 0}
_RESPONSE_PATH = f"{RESPONSES}/{{response_id}}"

OPERATIONS = (
    Operation(
        method="POST",
        path=RESPONSES,
        handler=create,
        summary="Create a response",
        body=ResponseBody,
        response=Response,
        streams=True,
        statuses=(400, 408, 409, 413, 429, 499),
    ),
    Operation(
        method="GET",
        path=_RESPONSE_PATH,
        handler=retrieve,
        summary="Retrieve a response, or follow its events",
        response=Response,
        streams=True,
        statuses=(400,),
        parameters=(
            _query("stream", {"type": "boolean"}, "Return the events of the response."),
            _query("starting_after", _COUNT, "The sequence_number of the last event received."),
        ),
    ),
    Operation(
        method="DELETE",
        path=_RESPONSE_PATH,
        handler=delete,
        summary="Delete a response",
        response=DeletedResponse,
    ),
    Operation(
        method="POST",
        path=f"{_RESPONSE_PATH}/cancel",
        handler=cancel,
        summary="Cancel a background response",
        response=Response,
        statuses=(400,),
    ),
    Operation(
        method="GET",
        path=f"{_RESPONSE_PATH}/input_items",
        handler=input_items,
        summary="List the input items of a response",
        response=ItemList,
        statuses=(400,),
        parameters=(
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Maximum number of items, default 20."),
            _query("order", {"enum": ["asc", "desc"]}, "Last item first by default."),
            _query("after", {"type": "string"}, "The id of an item; the items after it are listed."),
        ),
    ),
)
