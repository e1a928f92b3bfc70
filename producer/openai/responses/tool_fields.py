"""Tools in a response's body: functions without the envelope that a chat completion has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....shared.shown import shown
from ..errors import bad_field


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the caller can run; ``type`` is always "function"."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def chat_tools(
    tools: Sequence[FunctionTool], choice: str | dict[str, Any] | None, is_parallel: bool | None
) -> dict[str, Any]:
    """Return the equivalent fields of a chat completion.

    Raises:
        OpenAIError: 400, a tool is not a function of the caller, or the choice names none of them.
    """
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise bad_field(
                f"tools[{i}].type",
                f"tools[{i}].type must be 'function', got {shown(tool.type)}: built-in tools are not supported",
            )
        if not tool.name:
            raise bad_field(f"tools[{i}].name", f"tools[{i}].name must be given")
    fields: dict[str, Any] = {}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
    if tools:
        fields["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
        if is_parallel is not None:
            fields["parallel_tool_calls"] = is_parallel
    if choice is not None:
        fields["tool_choice"] = _choice(choice)
    return fields


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(tool).items() if name != "type"}


def _choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise bad_field(
            "tool_choice",
            "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
            f"{{'type': 'allowed_tools', ...}}, got {shown(choice)}",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _allowed(tools: Sequence[FunctionTool], choice: dict[str, Any]) -> tuple[list[FunctionTool], str]:
    """Return the tools that the choice allows, and the choice among them."""
    allowed, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        raise bad_field("tool_choice", "tool_choice 'allowed_tools' must have a mode, 'auto' or 'required', and tools")
    names = {tool.get("name") for tool in allowed if isinstance(tool, dict)}
    unknown = names - {tool.name for tool in tools}
    if unknown or not names:
        raise bad_field("tool_choice", f"tool_choice.tools must name some of the tools, got {shown(allowed)}")
    return [tool for tool in tools if tool.name in names], mode
