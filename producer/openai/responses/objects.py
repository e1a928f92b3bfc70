"""OpenAI's response object, its parts, and the events of a streamed response."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .items import Item, OutputText, ReasoningText

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


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    # Set by the ResponseWriter.
    sequence_number: int = 0


class ResponseCreated(_Event, kw_only=True, tag="response.created"):
    response: Response


class ResponseQueued(_Event, kw_only=True, tag="response.queued"):
    response: Response


class ResponseInProgress(_Event, kw_only=True, tag="response.in_progress"):
    response: Response


class ResponseCompleted(_Event, kw_only=True, tag="response.completed"):
    response: Response


class ResponseIncomplete(_Event, kw_only=True, tag="response.incomplete"):
    response: Response


class ResponseFailed(_Event, kw_only=True, tag="response.failed"):
    response: Response


class OutputItemAdded(_Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class OutputItemDone(_Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class _ItemEvent(_Event, kw_only=True):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: int = 0


class ContentPartAdded(_PartEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(_PartEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Any] = []


class OutputTextDone(_PartEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Any] = []


class ReasoningTextDelta(_PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(_PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomInputDone(_ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


Event = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
)
