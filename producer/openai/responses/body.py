"""The body of POST /v1/responses, and its translation to a chat completion.

The chat completion defines the meaning of fields; this module converts their shape and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....shared.values.shown import shown
from ..chat import ChatCompletionBody
from ..errors import OpenAIError, bad_field
from ..generation_body import GenerationBody
from .conversation import chat_messages
from .items import Item, ToolSearchOutput, ignored_items
from .offered_tools import OfferedTool, chat_tools, ignored_tools, read_offered

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "conversation": "send previous_response_id",
    "prompt": "send instructions and input",
    "n": "send several requests",
    "max_tokens": "send max_output_tokens",
}
_WITHOUT_EFFECT = ("context_management", "moderation", "prompt_cache_options")
# Values that are equivalent to omitting the field.
_NEUTRAL: tuple[Any, ...] = (None, [], {})
# Fields not passed to the chat completion: they have another name there, or do not affect the model.
_NOT_PASSED_ON = {
    "n",
    "max_tokens",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_retention",
}
_PASSED_ON = (
    "chat_template_kwargs",
    *(name for name in GenerationBody.__struct_fields__ if name not in _NOT_PASSED_ON),
)
_NAMES = (
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("messages", "input"),
)


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer: "text", "json_object", or "json_schema" with a name and a schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of reasoning. Summaries are not generated, because the reasoning itself is returned."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(GenerationBody, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The request: OpenAI's fields, and the fields of vLLM and Penstock that a chat completion has.

    ``include``, ``max_tool_calls`` and ``background_options`` have no effect, except "message.output_text.logprobs".
    ``webhook_url`` is Penstock's: it is notified of the end of a background response. ``conversation`` and ``prompt``
    are refused unless they are null or empty. The fields after them have no effect.
    """

    metadata: dict[str, str] | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    background_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    webhook_url: str | None = None

    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None

    @property
    def ignored(self) -> list[str]:
        """Paths of fields, tools and items that have no effect."""
        fields = [name for name in _WITHOUT_EFFECT if getattr(self, name) not in _NEUTRAL]
        return [*super().ignored, *fields, *ignored_tools(self.tools), *ignored_items(self.input)]

    @property
    def is_stored(self) -> bool:
        """Whether the response can be retrieved later."""
        return self.store is not False


def check_body(body: ResponseBody) -> None:
    """Refuse unsupported fields and combinations, independent of the input.

    Raises:
        OpenAIError: 400, the field is named.
    """
    for name, remedy in _REFUSED.items():
        value = getattr(body, name)
        if value not in _NEUTRAL and not (name == "n" and value == 1):
            raise bad_field(name, f"{name} is not supported here; {remedy}", code="unsupported_parameter")
    if body.input is None and body.previous_response_id is None:
        raise bad_field("input", "input must be given", code="missing_required_parameter")
    if body.truncation not in (None, "disabled", "auto"):
        raise bad_field("truncation", f"truncation must be 'disabled' or 'auto', got {shown(body.truncation)}")
    if body.background and not body.is_stored:
        raise bad_field("store", "store must not be false with background=true: the response is retrieved later")
    if body.webhook_url is not None and not body.background:
        raise bad_field(
            "webhook_url", "webhook_url needs background=true: otherwise the caller receives the response itself"
        )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise bad_field("top_logprobs", f"top_logprobs={body.top_logprobs} needs include=[{LOGPROBS!r}]")
    _check_metadata(body.metadata or {})


def offered_tools(body: ResponseBody, items: Sequence[Item]) -> list[OfferedTool]:
    """Return the tools that the model may call: those of the body, and those that searches have found.

    Raises:
        OpenAIError: 400, a tool is invalid; its field is named.
    """
    offered = {tool.flat_name: tool for tool in read_offered(body.tools or [])}
    for item in items:
        if isinstance(item, ToolSearchOutput):
            offered |= {tool.flat_name: tool for tool in read_offered(item.tools, "input.tools")}
    return list(offered.values())


def chat_body(body: ResponseBody, items: list[Item]) -> ChatCompletionBody:
    """Return the chat completion for all ``items`` of the conversation.

    Raises:
        OpenAIError: 400, the field is named.
    """
    messages = chat_messages(body.instructions, items)
    if not messages:
        raise bad_field("input", "input must hold at least one item")
    fields: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    fields |= chat_tools(offered_tools(body, items), body.tool_choice, body.parallel_tool_calls)
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        fields |= _response_format(body.text.format)
    if body.text is not None and body.text.verbosity is not None:
        fields["verbosity"] = body.text.verbosity
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return msgspec.convert(msgspec.to_builtins(fields | {"messages": messages}), ChatCompletionBody)


def with_response_names(error: OpenAIError) -> OpenAIError:
    """Return an error about a field of the chat completion with the name of the response's field it came from."""
    if error.param is None:
        return error
    for chat_name, name in _NAMES:
        if error.param.startswith(chat_name):
            return error.renamed(name + error.param.removeprefix(chat_name))
    return error


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.type != "json_schema":
        raise bad_field(
            "text.format.type",
            f"text.format.type must be 'text', 'json_object' or 'json_schema', got {shown(form.type)}",
        )
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            raise bad_field(f"text.format.{name}", f"text.format.{name} must be given with type 'json_schema'")
    schema = {name: value for name, value in msgspec.to_builtins(form).items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA_PAIRS:
        raise bad_field("metadata", f"metadata must hold at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise bad_field(
                "metadata",
                f"metadata must have keys of at most {MAX_METADATA_KEY_CHARS} characters and values of at most "
                f"{MAX_METADATA_VALUE_CHARS}, got {shown(key)}",
            )
