"""Select the formats in which a model writes tool calls and reasoning.

Sources, of which the first that shows a format counts:

1. ``response_template`` of ``tokenizer_config.json``, by which transformers splits an answer into fields, or its older
   form ``response_schema``. Its literals and regular expressions have the marks of the format.
2. The chat template, since it renders earlier replies of the model.
3. The added tokens of the vocabulary. For tool calls only, because models that do not think have tokens for it, too.

Source: transformers 5.23, "Response parsing". The names of formats are those of the parsers in ``producer/openai``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ...shared.errors import PenstockError
from ...shared.params.answer_formats import (
    OPENED_BY_PROMPT,
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format_of,
    tool_call_format_of,
)
from .chat_template import ChatTemplate

_CALLS = "tool_calls"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_ESCAPE = re.compile(r"\\([^\w\s])")


class ChatStyle(NamedTuple):
    """Names of parsers; empty if no source shows one. ``tool_call_source`` is the source of the first."""

    tool_call_parser: str = ""
    reasoning_parser: str = ""
    tool_call_source: str = ""


def style_of(
    template: ChatTemplate | None, response: Mapping[str, Any] | None = None, added_tokens: Iterable[str] = ()
) -> ChatStyle:
    """Return the parsers that the sources indicate.

    Args:
        response: the tokenizer's ``response_template`` or ``response_schema``.
    """
    response = response if isinstance(response, Mapping) else {}
    fields = response.get("fields") or response.get("properties")
    fields = fields if isinstance(fields, Mapping) else {}
    source = "" if template is None else template.source
    texts = {
        "response_template": _text_of(fields.get(_CALLS)),
        "chat_template": "" if template is None else template.tool_use_source,
        "vocabulary": "\n".join(added_tokens),
    }
    calls = ((tool_call_format_of(text), name) for name, text in texts.items())
    tool_call_parser, tool_call_source = next((call for call in calls if call[0]), ("", ""))
    reasoning = ""
    if any(name in fields for name in _REASONING):
        # The marks of an answer without calls may be those of the field "content".
        reasoning = reasoning_format_of(_text_of(response, without=_CALLS))
    reasoning = reasoning or reasoning_format_of(source)
    if reasoning and template is not None and _is_opened(template, REASONING_FORMATS[reasoning]):
        opened = REASONING_FORMATS[OPENED_BY_PROMPT]
        reasoning = OPENED_BY_PROMPT if REASONING_FORMATS[reasoning].start == opened.start else reasoning
    return ChatStyle(tool_call_parser, reasoning, tool_call_source)


def _text_of(node: Any, *, without: str = "") -> str:
    """Return the texts of a response template without the escapes of regular expressions."""
    return _ESCAPE.sub(r"\1", "\n".join(_texts(node, without)))


def _texts(node: Any, without: str) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from _texts(item, without)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if key != without:
                yield from _texts(value, without)


def _is_opened(template: ChatTemplate, reasoning: ReasoningFormat) -> bool:
    """Return whether the template ends the prompt with the mark that starts reasoning."""
    if reasoning.starts_in_prompt or reasoning.answer_marks:
        return False
    try:
        prompt = template.render([{"role": "user", "content": "probed"}], {})
    except PenstockError:  # it refuses this message, or is broken, so the end of the prompt is unknown
        return False
    return prompt.rstrip().endswith(reasoning.start)
