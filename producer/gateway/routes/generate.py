"""/v1/chat/completions, /v1/completions and /v1/messages: whole answers, streams, and resumed streams.

A client resumes a cut stream by sending its body again with the header ``Last-Event-ID``. The request is in Redis, and
the body determines the form of its answer, so no gateway stores anything. A GET would require the body to be stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ....shared.values.shown import shown
from ...anthropic.prepared import PreparedMessage
from ...inputs.options import MAX_SESSION_ID_CHARS, REPEAT_LINGER_S
from ...openai.answers.chat_objects import ChatCompletion
from ...openai.answers.common import new_id
from ...openai.chat import ChatCompletionBody
from ...openai.completions import Completion, CompletionBody
from ...openai.endpoints import CHAT_COMPLETIONS, COMPLETIONS, Decoded, decode
from ...openai.errors import ErrorBody, OpenAIError
from ...openai.prepared import Prepared, PreparedBody
from ...requests.fan_out import child_ids
from ...sse import EventStream
from .. import generations
from ..auth import Identity
from ..http import Gateway, add_ids, bind_request_id, gateway_of, json_response, read_body, while_connected
from ..idempotency import reserved
from ..message_stream import PING, MessagePosition, error_frame, message_events
from ..operations import Operation
from ..place import place_of
from ..reservations import HEADER, Reservation, digest_of
from ..stream import Position, event_stream, events

# Larger bodies are decoded in a thread, because that takes milliseconds, during which other streams must continue.
LARGE_BODY_BYTES = 64 * 1024
# Claude Code's name for the conversation.
SESSION_HEADER = "x-claude-code-session-id"
T = TypeVar("T")


async def decode_body(request: Request, path: str) -> tuple[Decoded, bool]:
    """Read and decode the body of a request for ``path``. Returns also whether it is large.

    Raises:
        OpenAIError: the body is invalid.
    """
    settings = gateway_of(request).settings
    body = await read_body(request, settings.max_body_bytes)
    is_large = len(body) > LARGE_BODY_BYTES
    decoded = await _run_sized(partial(decode, path, body, strict=settings.strict_fields), in_thread=is_large)
    request.state.ignored = decoded.ignored
    if HEADER in request.headers:
        request.state.body_digest = await _run_sized(lambda: digest_of(path, decoded.digest), in_thread=is_large)
    return decoded, is_large


async def prepare(request: Request, path: str) -> tuple[PreparedBody, str]:
    """Decode the body of a request for the parsers of its model. Returns the prepared body and its fingerprint.

    Raises:
        OpenAIError: the body is invalid.
    """
    decoded, is_large = await decode_body(request, path)
    parsers = await gateway_of(request).parsers.for_model(decoded.model)
    prepared = await _run_sized(partial(decoded.prepare, parsers), in_thread=is_large)
    return prepared, await _run_sized(lambda: decoded.fingerprint, in_thread=is_large)


async def _run_sized(function: Callable[[], T], *, in_thread: bool) -> T:
    return await asyncio.to_thread(function) if in_thread else function()


async def generate(path: str, request: Request) -> ASGIApp:
    """Answer a request of ``path``."""
    gateway = gateway_of(request)
    prepared, fingerprint = await prepare(request, path)
    assert isinstance(prepared, Prepared)  # the paths in OPERATIONS generate
    identity: Identity = request.state.identity
    last_event_id = request.headers.get("last-event-id")
    if last_event_id is not None:
        return await _resume(gateway, request, prepared, fingerprint, last_event_id)
    with prepared.naming_fields():
        prompts = await gateway.images.fetched(prepared.prompts, identity.tenant)
    prepared = msgspec.structs.replace(prepared, prompts=prompts)
    response_id = new_id(prepared.id_prefix, fingerprint)
    options = generations.options_of(prepared, identity, gateway.settings)
    if session_id := request.headers.get(SESSION_HEADER):
        options.setdefault("session_id", session_id[:MAX_SESSION_ID_CHARS])
    linger_s = gateway.settings.reconnect_grace_s
    if (reservation := await _reserved(request, prepared)) is not None:
        response_id = reserved_id(prepared.id_prefix, reservation)
        options["linger_s"] = linger_s = max(linger_s, REPEAT_LINGER_S)
        options["read_ttl_s"] = None  # another call may read the answer
    add_ids(options, request, response_id)
    if not prepared.stream:
        work = generations.answer(gateway.client, prepared, options, response_id)
        place = place_of(request, prepared.model, response_id)
        return json_response(await while_connected(request, place.during(work)))
    deltas = generations.stream(gateway.client, prepared, options, response_id, linger_s=linger_s)
    if isinstance(prepared, PreparedMessage):
        position = MessagePosition(response_id)
    else:
        position = Position.start(response_id, len(prepared.prompts) * prepared.params.n)
    return await _event_stream(gateway, request, prepared, deltas, position)


async def _reserved(request: Request, prepared: Prepared) -> Reservation | None:
    """Return the reservation of a body with an ``Idempotency-Key``; None without one."""
    gateway = gateway_of(request)

    def request_ids(reservation: Reservation) -> list[str]:
        response_id = reserved_id(prepared.id_prefix, reservation)
        ids = [generations.request_id_of(response_id, position) for position in range(len(prepared.prompts))]
        return [child for request_id in ids for child in child_ids(request_id, prepared.params.n)]

    return await reserved(request, request_ids, partial(_model_name, gateway, prepared))


def reserved_id(id_prefix: str, reservation: Reservation) -> str:
    """Return the response id of a reservation."""
    return new_id(id_prefix, time_s=reservation.created_at, seed=reservation.seed)


async def _resume(
    gateway: Gateway, request: Request, prepared: Prepared, fingerprint: str, last_event_id: str
) -> EventStream:
    if not prepared.stream:
        raise OpenAIError(400, "Last-Event-ID needs stream=true", param="stream")
    if isinstance(prepared, PreparedMessage):
        position = MessagePosition.parse_event_id(last_event_id, prepared, fingerprint)
    else:
        num_answers = len(prepared.prompts) * prepared.params.n
        position = Position.parse(last_event_id, num_answers, prepared.id_prefix, fingerprint)
    bind_request_id(position.response_id)
    model = await _model_name(gateway, prepared)
    status = await gateway.client.status(position.response_id, model)
    if status.tenant != request.state.identity.tenant:
        raise OpenAIError(404, f"request {shown(position.response_id)} is unknown", code="request_not_found")
    gateway.metrics.resumed.inc()
    deltas = generations.replay(
        gateway.client,
        prepared,
        model,
        position.response_id,
        position.next_indexes,
        linger_s=gateway.settings.reconnect_grace_s,
    )
    return await _event_stream(gateway, request, prepared, deltas, position)


async def _event_stream(
    gateway: Gateway,
    request: Request,
    prepared: Prepared,
    deltas: AsyncGenerator[generations.PromptDelta],
    position: Position | MessagePosition,
) -> EventStream:
    model = prepared.model or await _model_name(gateway, prepared)
    request_id = position.response_id
    if isinstance(position, Position):
        chunks = prepared.events(position.response_id, model)
        return await event_stream(request, events(deltas, prepared, chunks, position), model, request_id)
    assert isinstance(prepared, PreparedMessage)
    encoded = message_events(deltas, prepared, model, position)
    error_event = partial(error_frame, request.state.x_request_id)
    return await event_stream(request, encoded, model, request_id, error_event=error_event, keep_alive=PING)


async def _model_name(gateway: Gateway, prepared: Prepared) -> str:
    """Return the name of the model that serves the body, which may not name one.

    Raises:
        UnknownModelError: no worker has ever served it.
    """
    return await gateway.client.resolve_model(prepared.model)


_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The id of the last event of a stream that this same body started; the stream resumes after it.",
}


def generation_operation(
    path: str,
    summary: str,
    body: type[msgspec.Struct],
    response: type[msgspec.Struct],
    error: type[msgspec.Struct] = ErrorBody,
) -> Operation:
    """Return the operation of a path that generates: a whole answer, a stream, or a resumed one."""
    return Operation(
        method="POST",
        path=path,
        handler=partial(generate, path),
        summary=summary,
        body=body,
        response=response,
        streams=True,
        error=error,
        statuses=(400, 408, 409, 413, 429, 499),
        parameters=(_LAST_EVENT_ID,),
    )


OPERATIONS = (
    generation_operation(CHAT_COMPLETIONS, "Answer chat messages", ChatCompletionBody, ChatCompletion),
    generation_operation(COMPLETIONS, "Continue one prompt or several", CompletionBody, Completion),
)
