"""Items of a response's input and output, with OpenAI's names. What an answer holds can be sent back as input."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text that the caller wrote."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """An image of the caller, as a data URL or an address; ``detail`` is taken and not read."""

    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text that a model wrote."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """Text by which a model declined; never made here, but an assistant's message of other origin may have it."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What a model thought."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A summary of what a model thought; never made here."""

    text: str


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What one side said."""

    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus | None = None
    content: str | list[InputText | OutputText | Refusal | InputImage]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A model's wish that the caller runs a function; ``arguments`` is JSON as the model wrote it."""

    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | None = None


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """What the function gave that the call ``call_id`` asked for."""

    id: str | None = None
    call_id: str
    output: str | list[InputText]
    status: ItemStatus | None = None


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What a model thought before it answered. ``encrypted_content`` of other origin is taken and not read."""

    id: str | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
_ID_PREFIX = {Message: "msg", FunctionCall: "fc", FunctionCallOutput: "fco", Reasoning: "rs"}


def item_id(kind: type[Item], response_id: str, index: int | str) -> str:
    """Return the id of an item of a response: it follows from its place, so it is the same in every reading."""
    return f"{_ID_PREFIX[kind]}_{response_id[len('resp_') :]}_{index}"
