"""The body of POST /v1/messages, and its translation to a chat completion.

The chat completion defines the meaning of fields; this module converts their shape and names.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...shared.values.shown import shown
from ..openai.chat import ChatCompletionBody
from ..openai.errors import OpenAIError, bad_field, error_of
from ..openai.generation_body import GenerationBody
from ..openai.thinking import Thinking
from .blocks import Block, InputMessage, chat_messages, dropped_kinds, referenced_tools

# Kinds of tools that Anthropic runs. They are dropped, because programs cannot always leave them out.
_SERVER_TOOLS = frozenset(
    (
        "web_search", "web_fetch", "code_execution", "tool_search_tool_bm25", "tool_search_tool_regex", "mcp_toolset",
        "advisor",
    )
)  # fmt: skip
_CUSTOM = "custom"
_DATE = re.compile(r"_?\d{8}$")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that are not passed to the chat completion: they have another name there, or do not affect the model.
_NOT_PASSED_ON = {"n", "max_tokens", "stop", "stream_options", "user", "metadata", "store", "service_tier"}
_PASSED_ON = ("chat_template_kwargs", *(f for f in GenerationBody.__struct_fields__ if f not in _NOT_PASSED_ON))
_NAMES = (
    (r"max_completion_tokens\b", "max_tokens"),
    (r"response_format\.json_schema\.schema\b", "output_config.format.schema"),
    (r"response_format\b(\.json_schema\b)?", "output_config.format"),
    (r"reasoning_effort\b", "output_config.effort"),
    (r"stop\b", "stop_sequences"),
    (r"(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"tool_choice\.function\b", "tool_choice"),
)


class ThinkingConfig(Thinking, kw_only=True):
    """Choice whether the model thinks. With ``display`` "omitted" the blocks of thinking are empty."""

    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The form of the answer; ``type`` is always "json_schema"."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Effort of thinking, and form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Choice of the tools that the model may call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(GenerationBody, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The request: Anthropic's fields, and the fields of vLLM and Penstock that a chat completion has.

    ``cache_control`` and ``metadata`` have no effect, because prefixes are always cached. ``output_format`` is the
    former name of ``output_config.format``.
    """

    messages: list[InputMessage]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """Paths of tools and blocks that have no effect, each once."""
        tools = [f"tools.{_kind_of(tool)}" for tool in self.tools or () if _is_ignored(tool)]
        blocks = [f"messages.{kind}" for kind in dropped_kinds(self.messages)]
        return [*dict.fromkeys(tools + blocks)]

    @property
    def shows_thinking(self) -> bool:
        """Whether thinking blocks have their text."""
        return self.thinking is None or self.thinking.display != "omitted"


class FieldNames(msgspec.Struct, frozen=True):
    """Names in the body of the fields of a chat completion.

    Args:
        messages: for each chat message, the field from which it comes.
        tools: for each function, its index among the tools.
    """

    messages: tuple[str, ...] = ()
    tools: tuple[int, ...] = ()

    def rename(self, text: str) -> str:
        """Return a path, or a sentence that begins with one, with the names in the body."""
        if (match := re.match(r"messages\[(\d+)\]", text)) and int(match[1]) < len(self.messages):
            return self.messages[int(match[1])] + text[match.end() :]
        if (match := re.match(r"tools\[(\d+)\]", text)) and int(match[1]) < len(self.tools):
            text = f"tools[{self.tools[int(match[1])]}]{text[match.end() :]}"
        for pattern, name in _NAMES:
            if re.match(pattern, text):
                return re.sub(pattern, name, text, count=1)
        return text

    def renamed(self, error: OpenAIError) -> OpenAIError:
        """Return an error about a field of the chat completion as one about the field of the body."""
        return error if error.param is None else error.renamed(self.rename(error.param))


def chat_body(body: MessagesBody) -> tuple[ChatCompletionBody, FieldNames]:
    """Return the equivalent chat completion, and the names of its fields in the body.

    Raises:
        OpenAIError: 400, a field is invalid; it is named.
    """
    if body.n not in (None, 1):
        raise bad_field("n", f"n must be 1 here, got {body.n}; send several requests")
    chat = chat_messages(body.system, body.messages)
    functions, tool_indexes = _functions(body)
    fields: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    fields |= _tool_choice(body.tool_choice)
    if functions:
        fields["tools"] = functions
    fields |= _output(body.output_config or OutputConfig(), body.output_format)
    names = FieldNames(tuple(chat.fields), tuple(tool_indexes))
    try:
        chat_body = msgspec.convert(msgspec.to_builtins(fields) | {"messages": []}, ChatCompletionBody)
    except msgspec.ValidationError as error:
        raise names.renamed(error_of(error)) from error
    chat_body.messages = chat.messages
    chat_body.max_completion_tokens = body.max_tokens
    chat_body.stop = body.stop_sequences or body.stop
    if body.thinking is not None:
        chat_body.thinking = Thinking(type=body.thinking.type, budget_tokens=body.thinking.budget_tokens)
    return chat_body, names


def _functions(body: MessagesBody) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the functions that the model may call, and the index of each among the tools.

    A tool with ``defer_loading`` is offered once the conversation has referred to it.
    """
    added, removed = referenced_tools(body.messages)
    functions: list[dict[str, Any]] = []
    indexes: list[int] = []
    for i, tool in enumerate(body.tools or ()):
        name = tool.get("name")
        if _is_ignored(tool) or name in removed or (tool.get("defer_loading") and name not in added):
            continue
        if _kind_of(tool) != _CUSTOM:
            raise bad_field(
                f"tools[{i}].type",
                f"tools[{i}].type {shown(tool['type'])} is not supported; leave the type out, and describe the tool's "
                "input in input_schema",
            )
        function = {"name": name, "description": tool.get("description"), "parameters": tool.get("input_schema")}
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        functions.append({"type": "function", "function": function})
        indexes.append(i)
    return functions, indexes


def _kind_of(tool: dict[str, Any]) -> str:
    """Return the type of a tool without its date."""
    kind = tool.get("type") or _CUSTOM
    return _DATE.sub("", kind) if isinstance(kind, str) else shown(kind)


def _is_ignored(tool: dict[str, Any]) -> bool:
    return _kind_of(tool) in _SERVER_TOOLS


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        fields["tool_choice"] = _CHOICES[choice.type]
    else:
        raise bad_field(
            "tool_choice.type",
            f"tool_choice.type must be 'auto', 'any', 'none' or 'tool' with a name, got {shown(choice.type)}",
        )
    return fields


def _output(config: OutputConfig, former_format: OutputFormat | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    form = config.format or former_format
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if form is not None:
        if form.type != "json_schema" or form.schema is None:
            raise bad_field(
                "output_config.format",
                f"output_config.format must have the type 'json_schema' and a schema, got {shown(form.type)}",
            )
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form.schema},
        }
    return fields
