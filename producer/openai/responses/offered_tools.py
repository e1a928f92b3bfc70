"""The tools of a response: each kind becomes a function of the chat completion, and its calls become items of its kind.

| kind | function | item of a call |
| function | the same | function_call |
| function or custom within a namespace | its name is ``NAMESPACE__NAME`` | with ``name`` and ``namespace`` |
| custom | a custom tool of the chat completion | custom_tool_call |
| tool_search, run by the client | the same, by the name ``tool_search`` | tool_search_call |

Tools that OpenAI's servers run are not offered to the model; ``ignored_tools`` names them.
Source: OpenAI's API reference, ``Response.tools``; requests of Codex 0.171.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ....shared.errors import ValidationError
from ....shared.values.shown import shown
from ..errors import bad_field, error_of
from ..tools.custom import read_input_grammar

Kind = Literal["function", "custom", "tool_search"]
TOOL_SEARCH = "tool_search"
SEPARATOR = "__"
MAX_NAME_CHARS = 128
_DIGEST_CHARS = 16
# Kinds that the caller runs, but whose calls have forms of their own.
_CLIENT_KINDS = ("local_shell", "apply_patch")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_ANY_OBJECT = {"type": "object", "properties": {}}


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the model sees it, and as the caller does.

    Args:
        flat_name: name of the function; unique in the request.
        kind, name, namespace: the caller's; ``namespace`` is None outside of one.
        function: the function or custom tool in the form of a chat completion.
    """

    flat_name: str
    kind: Kind
    name: str
    namespace: str | None = None
    function: dict[str, Any] = {}

    @property
    def chat_type(self) -> str:
        """Type of the tool in a chat completion."""
        return "custom" if self.kind == "custom" else "function"


def read_offered(tools: Iterable[Any], field: str = "tools", namespace: str | None = None) -> list[OfferedTool]:
    """Return the tools that are offered to the model.

    Raises:
        OpenAIError: 400, a tool is invalid; its field is named.
    """
    offered: list[OfferedTool] = []
    for position, tool in enumerate(tools):
        place = f"{field}[{position}]"
        kind = _kind(tool, place)
        if kind == "namespace" and namespace is None:
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise bad_field(f"{place}.tools", f"{place}.tools must be a list of tools, got {shown(inner)}")
            offered += read_offered(inner, f"{place}.tools", _text(tool, "name", place))
        elif kind == "function":
            offered.append(_function(tool, place, namespace))
        elif kind == "custom":
            offered.append(_custom(tool, place, namespace))
        elif kind == TOOL_SEARCH and _is_clients(tool):
            offered.append(_search(tool))
        elif kind in _CLIENT_KINDS or (kind == "shell" and _runs_locally(tool)):
            raise bad_field(
                f"{place}.type", f"{place}.type {shown(kind)} is not supported; offer the tool as a function"
            )
    return offered


def ignored_tools(tools: Any) -> list[str]:
    """Return the paths of the kinds of tools that are not offered, and of keys of functions that have no effect."""
    paths: dict[str, None] = {}
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
            continue
        if kind == "function":
            paths |= {f"tools.function.{key}": None for key in tool if key not in (*_FUNCTION_KEYS, "type")}
        elif not (kind in ("namespace", "custom", *_CLIENT_KINDS) or (kind == TOOL_SEARCH and _is_clients(tool))):
            paths[f"tools.{kind}"] = None
    return list(paths)


def chat_tools(
    offered: Sequence[OfferedTool], choice: str | dict[str, Any] | None, is_parallel: bool | None
) -> dict[str, Any]:
    """Return the equivalent fields of a chat completion.

    Raises:
        OpenAIError: 400, the choice names none of the tools.
    """
    fields: dict[str, Any] = {}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        offered, choice = _allowed(offered, choice)
    if offered:
        fields["tools"] = [{"type": tool.chat_type, tool.chat_type: tool.function} for tool in offered]
        if is_parallel is not None:
            fields["parallel_tool_calls"] = is_parallel
    if isinstance(choice, dict):
        tool = chosen_tool(offered, choice)
        fields["tool_choice"] = {"type": tool.chat_type, tool.chat_type: {"name": tool.flat_name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    return fields


def chosen_tool(offered: Sequence[OfferedTool], choice: dict[str, Any]) -> OfferedTool:
    """Return the tool that an object of ``tool_choice`` names.

    Raises:
        OpenAIError: 400, it names none of the tools.
    """
    chosen = _named(offered, choice)
    if chosen is not None:
        return chosen
    names = ", ".join(tool.flat_name for tool in offered) or "none"
    raise bad_field(
        "tool_choice",
        "tool_choice must be 'none', 'auto', 'required', {'type': 'allowed_tools', ...} or the type and name of a tool "
        f"that can be called ({names}), got {shown(choice)}",
    )


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function for a tool. One that is too long ends in a digest of its full name."""
    full = name if namespace is None else f"{namespace}{SEPARATOR}{name}"
    if namespace is None or len(full) <= MAX_NAME_CHARS:
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{full[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def _kind(tool: Any, place: str) -> str:
    if not isinstance(tool, dict):
        raise bad_field(place, f"{place} must be an object, got {shown(tool)}")
    return _text(tool, "type", place)


def _text(tool: Mapping[str, Any], key: str, place: str) -> str:
    value = tool.get(key)
    if not isinstance(value, str) or not value:
        raise bad_field(f"{place}.{key}", f"{place}.{key} must be given, as a string, got {shown(value)}")
    return value


def _is_clients(tool: Mapping[str, Any]) -> bool:
    return tool.get("execution") == "client"


def _runs_locally(tool: Mapping[str, Any]) -> bool:
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") == "local"


def _function(tool: dict[str, Any], place: str, namespace: str | None) -> OfferedTool:
    name = _text(tool, "name", place)
    function = {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}
    function["name"] = flat_name(name, namespace)
    return OfferedTool(flat_name=function["name"], kind="function", name=name, namespace=namespace, function=function)


def _custom(tool: dict[str, Any], place: str, namespace: str | None) -> OfferedTool:
    name = _text(tool, "name", place)
    custom: dict[str, Any] = {"name": flat_name(name, namespace)}
    if tool.get("description"):
        custom["description"] = str(tool["description"])
    try:
        grammar = read_input_grammar(name, tool.get("format"), f"{place}.format")
    except ValidationError as error:
        raise error_of(error) from error
    if grammar is not None:
        custom["format"] = {"type": "grammar", "grammar": {"syntax": grammar.syntax, "definition": grammar.definition}}
    return OfferedTool(flat_name=custom["name"], kind="custom", name=name, namespace=namespace, function=custom)


def _search(tool: dict[str, Any]) -> OfferedTool:
    parameters = tool.get("parameters")
    function: dict[str, Any] = {
        "name": TOOL_SEARCH,
        "parameters": parameters if parameters is not None else _ANY_OBJECT,
    }
    if tool.get("description"):
        function["description"] = tool["description"]
    return OfferedTool(flat_name=TOOL_SEARCH, kind=TOOL_SEARCH, name=TOOL_SEARCH, function=function)


def _named(offered: Sequence[OfferedTool], choice: Mapping[str, Any]) -> OfferedTool | None:
    kind, name = choice.get("type"), choice.get("name")
    if kind == TOOL_SEARCH:
        name = TOOL_SEARCH
    namespace = choice.get("namespace")
    matches = [
        tool
        for tool in offered
        if tool.kind == kind and tool.name == name and (namespace is None or tool.namespace == namespace)
    ]
    return matches[0] if matches else None


def _allowed(offered: Sequence[OfferedTool], choice: dict[str, Any]) -> tuple[list[OfferedTool], str]:
    """Return the tools that the choice allows, and the choice among them."""
    allowed, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        raise bad_field("tool_choice", "tool_choice 'allowed_tools' must have a mode, 'auto' or 'required', and tools")
    entries = [entry for entry in allowed if isinstance(entry, dict)]
    tools = [_named(offered, entry) for entry in entries if entry.get("type") in ("function", "custom", TOOL_SEARCH)]
    if not tools or None in tools:
        raise bad_field("tool_choice", f"tool_choice.tools must name some of the tools, got {shown(allowed)}")
    return [tool for tool in offered if tool in tools], mode
