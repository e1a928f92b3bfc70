"""Events of a streamed response, with OpenAI's names."""

from __future__ import annotations

from typing import Any

import msgspec

from .items import Item, OutputText, ReasoningText
from .objects import Response


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
)
