"""/tokenize and /detokenize, as in vLLM. A worker process answers, since the gateway has no tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...inputs.prompt import Prompt
from ...openai.errors import bad_field
from ...openai.messages import ChatMessage, template_messages
from ..http import gateway_of, json_response, read_struct, while_connected
from ..operations import Operation


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request: ``prompt``, or ``messages`` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenized(msgspec.Struct):
    """The response. ``token_strs`` is null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct):
    """The response."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Answer POST /tokenize."""
    gateway, body = gateway_of(request), await read_struct(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "exactly one of prompt and messages must be given")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        kwargs["add_generation_prompt"] = body.add_generation_prompt
    if body.messages is not None and body.add_special_tokens:
        raise bad_field("add_special_tokens", "add_special_tokens is for a prompt; the chat template adds its own")
    if body.messages is None and kwargs:
        raise bad_field("messages", "add_generation_prompt and chat_template_kwargs need messages")
    prompt: Prompt = body.prompt or ""
    if body.messages is not None:
        parsers = await gateway.parsers.for_model(body.model)
        prompt = template_messages(body.messages, keeps_developer=parsers.takes_developer)
    work = gateway.client.tokenize(
        prompt,
        model=body.model,
        add_special_tokens=body.add_special_tokens is not False,
        chat_template_kwargs=kwargs,
        has_pieces=bool(body.return_token_strs),
    )
    result = await while_connected(request, work)
    pieces = [piece.decode(errors="replace") for piece in result.pieces] if body.return_token_strs else None
    return json_response(Tokenized(len(result.token_ids), result.max_model_len, result.token_ids, pieces))


async def detokenize(request: Request) -> Response:
    """Answer POST /detokenize."""
    body = await read_struct(request, DetokenizeBody)
    work = gateway_of(request).client.detokenize(body.tokens, model=body.model)
    return json_response(Detokenized(await while_connected(request, work)))


_STATUSES = (400, 413, 499)

OPERATIONS = (
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Tokenize a text or chat messages",
        body=TokenizeBody,
        response=Tokenized,
        statuses=_STATUSES,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="Turn token ids into text",
        body=DetokenizeBody,
        response=Detokenized,
        statuses=_STATUSES,
    ),
)
