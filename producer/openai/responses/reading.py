"""Convert the ``input`` of a body to items."""

from __future__ import annotations

from typing import Any

import msgspec

from ....shared.shown import shown
from ..errors import OpenAIError, bad_field, error_of
from .items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    Reasoning,
    item_id,
)

_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def read_items(value: str | list[Any] | None, response_id: str) -> list[Item]:
    """Return the items of an input. Each gets an id, and contents become lists of parts.

    Raises:
        OpenAIError: 400, an item has an invalid form or an unsupported type; its field is named.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_completed(_item(i, item), f"in{i}", response_id) for i, item in enumerate(value)]


def _item(i: int, value: Any) -> Item:
    if not isinstance(value, dict):
        raise bad_field(f"input[{i}]", f"input[{i}] must be an item, an object, got {type(value).__name__}")
    kind = value.get("type") or ("message" if "role" in value else None)
    if kind not in _TYPES:
        raise bad_field(
            f"input[{i}].type",
            f"input[{i}].type must be one of {', '.join(_TYPES)}, got {shown(kind)}",
            code="unsupported_item_type",
        )
    try:
        return msgspec.convert(value | {"type": kind}, Item)
    except msgspec.ValidationError as error:
        raise _error_in_item(f"input[{i}]", error_of(error)) from error


def _error_in_item(path: str, error: OpenAIError) -> OpenAIError:
    """Return an error about a field of one item as one about a field of the input."""
    param = f"{path}.{error.param}" if error.param else path
    reason = error.message.removeprefix(error.param or "")
    if param.endswith(".type"):
        reason += "; supported types are input_text, input_image, output_text and refusal"
    return bad_field(param, param + (reason if error.param else f": {reason}"), code=error.error_code)


def _completed(item: Item, index: str, response_id: str) -> Item:
    item.id = item.id or item_id(type(item), response_id, index)
    match item:
        case Message():
            if isinstance(item.content, str):
                is_output = item.role == "assistant"
                item.content = [OutputText(item.content) if is_output else InputText(item.content)]
            item.status = "completed"
        case FunctionCall() | FunctionCallOutput() | Reasoning():
            item.status = item.status or "completed"
    return item
