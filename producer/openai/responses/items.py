"""Items of a response's input and output, with OpenAI's names. Output items can be sent back as input."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text written by the caller."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """An image from the caller, as a URL; ``detail`` is accepted but ignored."""

    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text written by a model."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """Refusal of a model. It is never generated here, but messages from elsewhere may contain it."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of a model's reasoning."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """Summary of a model's reasoning; never generated here."""

    text: str


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the caller or the model."""

    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus | None = None
    content: str | list[InputText | OutputText | Refusal | InputImage]


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A model's call of a function that the caller runs; ``arguments`` is JSON as the model wrote it."""

    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | None = None


class FunctionCallOutput(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of the function call ``call_id``."""

    id: str | None = None
    call_id: str
    output: str | list[InputText]
    status: ItemStatus | None = None


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of a model before its answer. ``encrypted_content`` from elsewhere is accepted but ignored."""

    id: str | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
_ID_PREFIX = {Message: "msg", FunctionCall: "fc", FunctionCallOutput: "fco", Reasoning: "rs"}


def item_id(kind: type[Item], response_id: str, index: int | str) -> str:
    """Return the id of an item of a response. It is derived from its position, so it is the same in every reading."""
    return f"{_ID_PREFIX[kind]}_{response_id[len('resp_') :]}_{index}"
