"""OpenAI's response object and its parts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .items import Item

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDED: frozenset[Status] = frozenset({"completed", "incomplete", "failed", "cancelled"})


class ResponseError(msgspec.Struct):
    """Why a response failed; ``code`` is one of OpenAI's."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


class InputTokensDetails(msgspec.Struct):
    """``cached_tokens``: tokens found in the engine's KV cache. Writes to the cache are not reported."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """``reasoning_tokens`` are included in the output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response. Tokens that were computed again count once."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """A response in its current state: ``output`` has the items so far, and ``usage`` is set at the end.

    Fields of the request are returned unchanged. Times are Unix seconds.
    """

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    """The response to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True
