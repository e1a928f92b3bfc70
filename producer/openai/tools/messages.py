"""Check tool calls and their results in the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....shared.errors import ValidationError
from ....shared.shown import shown


def check_tool_calls(calls: Sequence[object], field: str) -> None:
    """Check the calls of an assistant's message. Arguments may be any text, since models also write invalid JSON.

    Raises:
        ValidationError: a call is incomplete; names the field.
    """
    for position, call in enumerate(calls):
        place = f"{field}[{position}]"
        if not isinstance(call, Mapping):
            raise ValidationError(f"{place} must be an object, got {shown(call)}")
        if call.get("type", "function") != "function":
            raise ValidationError(f"{place}.type must be 'function', got {shown(call['type'])}")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise ValidationError(f"{place}.function must be an object, got {shown(function)}")
        for name, value in (("id", call.get("id")), ("function.name", function.get("name"))):
            if not isinstance(value, str) or not value:
                raise ValidationError(f"{place}.{name} must be a non-empty string, got {shown(value)}")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            raise ValidationError(f"{place}.function.arguments must be JSON as a string, got {shown(arguments)}")


def check_tool_result(tool_call_id: object, field: str) -> None:
    """Check the id in a tool's message.

    Raises:
        ValidationError: it is missing.
    """
    if not isinstance(tool_call_id, str) or not tool_call_id:
        raise ValidationError(f"{field} must be the id of the call that the message answers, got {shown(tool_call_id)}")
