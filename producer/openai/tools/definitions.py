"""Check the tools that a request offers, and its choice among them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....shared.errors import ValidationError
from ....shared.values.shown import shown
from ..json_schema import check_schema
from .custom import InputGrammar, custom_function, read_input_grammar

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_KEYS = frozenset({"name", "description", "parameters", "strict"})
_KINDS = ("function", "custom")


class Function(NamedTuple):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments, an object.

    ``is_custom``: it stands for a custom tool, whose input follows ``grammar`` if there is one.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool
    is_custom: bool = False
    grammar: InputGrammar | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """The function in the form that transformers passes to chat templates, with the same order of keys."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolChoice(NamedTuple):
    """``mode`` is "none", "auto" or "required". With ``name`` only that function may be called."""

    mode: str
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer consists of one or more calls and nothing else."""
        return self.mode == "required"


def read_tools(tools: object) -> list[Function]:
    """Return the functions of ``tools``, which is OpenAI's list or None.

    Raises:
        ValidationError: a part is invalid; names the field.
    """
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ValidationError(f"tools must be a list of tools, got {shown(tools)}")
    functions: dict[str, Function] = {}
    for position, tool in enumerate(tools):
        function = _read_tool(tool, f"tools[{position}]")
        if function.name in functions:
            raise ValidationError(f"tools[{position}].function.name must be unique, got {shown(function.name)}")
        functions[function.name] = function
    return list(functions.values())


def unknown_function_keys(tools: Sequence[object] | None) -> list[str]:
    """Return the paths of the keys of functions that have no effect, each once."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    keys = [key for function in functions if isinstance(function, Mapping) for key in function if key not in _KEYS]
    return [f"tools.function.{key}" for key in dict.fromkeys(keys)]


def allowed_functions(tool_choice: object, functions: list[Function]) -> tuple[list[Function], object]:
    """Return the functions allowed by a choice of the type "allowed_tools", and the choice among them.

    Raises:
        ValidationError: a choice of that type is invalid; names the field.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return functions, tool_choice
    field, allowed = "tool_choice.allowed_tools", tool_choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise ValidationError(f"{field}.mode must be 'auto' or 'required', in an object, got {shown(allowed)}")
    tools = allowed.get("tools")
    if not isinstance(tools, Sequence) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValidationError(f"{field}.tools must be a list of at least one of the tools, got {shown(tools)}")
    choices = [read_tool_choice(tool, functions, field=f"{field}.tools[{i}]") for i, tool in enumerate(tools)]
    names = {choice.name for choice in choices}
    return [function for function in functions if function.name in names], allowed["mode"]


def read_tool_choice(tool_choice: object, functions: Sequence[Function], *, field: str = "tool_choice") -> ToolChoice:
    """Return the tool choice. None means "auto" if there are tools, else "none".

    Raises:
        ValidationError: it is not a choice, or names no function of ``functions``.
    """
    if tool_choice is None:
        return ToolChoice("auto" if functions else "none")
    if tool_choice == "any":  # Mistral's and Anthropic's name
        tool_choice = "required"
    if tool_choice in ("none", "auto", "required"):
        assert isinstance(tool_choice, str)
        if tool_choice == "required" and not functions:
            raise ValidationError(f"{field} is 'required', but tools is empty; pass tools")
        return ToolChoice(tool_choice if functions else "none")
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    if not isinstance(tool_choice, Mapping) or kind not in _KINDS:
        raise ValidationError(
            f"{field} must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {shown(tool_choice)}"
        )
    tool = tool_choice.get(kind)
    name = tool.get("name") if isinstance(tool, Mapping) else None
    names = [function.name for function in functions if function.is_custom == (kind == "custom")]
    if name not in names:
        offered = ", ".join(names) or "none"
        raise ValidationError(f"{field}.{kind}.name must be one of the tools ({offered}), got {shown(name)}")
    return ToolChoice("required", name)


def _read_tool(tool: object, field: str) -> Function:
    if not isinstance(tool, Mapping):
        raise ValidationError(f"{field} must be an object, got {shown(tool)}")
    kind = tool.get("type")
    if kind not in _KINDS:
        raise ValidationError(f"{field}.type must be 'function' or 'custom', got {shown(kind)}")
    field, function, grammar = f"{field}.{kind}", tool.get(kind), None
    if not isinstance(function, Mapping):
        raise ValidationError(f"{field} must be an object, got {shown(function)}")
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValidationError(f"{field}.name must be 1 to 128 of a-z, A-Z, 0-9, _, . and -, got {shown(name)}")
    if not isinstance(description, str | None):
        raise ValidationError(f"{field}.description must be a string, got {shown(description)}")
    if not isinstance(strict, bool | None):
        raise ValidationError(f"{field}.strict must be true or false, got {shown(strict)}")
    if kind == "custom":
        grammar = read_input_grammar(name, function.get("format"), f"{field}.format")
        function = custom_function(function, grammar)
    parameters = _read_parameters(function, f"{field}.parameters")
    return Function(name, function.get("description"), parameters, bool(strict), kind == "custom", grammar)


def _read_parameters(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    schema = function.get("parameters")
    parameters = {"type": "object", "properties": {}} if schema is None else check_schema(schema, field)
    if not parameters:
        return {"type": "object"}
    if parameters.get("type", "object") != "object":
        raise ValidationError(f"{field}.type must be 'object', got {shown(parameters['type'])}")
    return parameters
