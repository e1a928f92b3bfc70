"""/v1/messages: Anthropic's Messages API; its logic is in ``producer/anthropic``."""

from __future__ import annotations

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from ...anthropic.body import MessagesBody
from ...anthropic.errors import MESSAGES, MessagesError
from ...anthropic.objects import Message, TokensCount
from ...inputs.images import is_image_part
from ..http import gateway_of, json_response, while_connected
from ..operations import Operation
from .generate import generation_operation, prepare


async def count_tokens(request: Request) -> Response:
    """Answer POST /v1/messages/count_tokens. An image counts as its placeholder, since only an engine knows its
    size."""
    gateway = gateway_of(request)
    prepared, _ = await prepare(request, MESSAGES)
    with prepared.naming_fields():
        work = gateway.client.tokenize(
            [_without_images(message) for message in cast(Any, prepared.prompts[0])],
            model=prepared.model,
            chat_template_kwargs=prepared.options.get("chat_template_kwargs"),
        )
        tokenized = await while_connected(request, work)
    return json_response(TokensCount(len(tokenized.token_ids)))


def _without_images(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [{"type": "image"} if is_image_part(part) else part for part in content]
    return {**message, "content": content}


OPERATIONS = (
    generation_operation(MESSAGES, "Answer messages, as Anthropic's API", MessagesBody, Message, MessagesError),
    Operation(
        method="POST",
        path=f"{MESSAGES}/count_tokens",
        handler=count_tokens,
        summary="Count the tokens of messages, as Anthropic's API",
        body=MessagesBody,
        response=TokensCount,
        error=MessagesError,
        statuses=(400, 413, 499),
    ),
)
