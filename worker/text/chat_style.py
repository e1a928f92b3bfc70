"""Derive how a model writes tool calls and reasoning from its chat template.

Names are those of the parsers in ``producer/openai`` and of vLLM. A template shows how the model was trained, since it
renders earlier replies of the model.
"""

from __future__ import annotations

from typing import NamedTuple

from ...shared.errors import PenstockError
from ...shared.params.chat import REASONING_MARKS
from .chat_template import ChatTemplate

# Marks in a template and the parser that they indicate; the first match counts.
_TOOL_CALLS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
# Qwen's Coder and GLM use the same marks, but write XML between them.
_NOT_HERMES = ("<function=", "<arg_key>")
# The parser of qwen3's marks if the prompt already contains the first one.
OPENED_BY_PROMPT = "deepseek_r1"


class ChatStyle(NamedTuple):
    """Names of parsers; empty if the template shows none."""

    tool_call_parser: str = ""
    reasoning_parser: str = ""


def style_of(template: ChatTemplate) -> ChatStyle:
    """Return the parsers that ``template`` indicates."""
    source = template.tool_use_source
    tool_calls = next((name for mark, name in _TOOL_CALLS if mark in source), "")
    if tool_calls == "hermes" and any(mark in source for mark in _NOT_HERMES):
        tool_calls = ""
    return ChatStyle(tool_calls, _reasoning(template))


def _reasoning(template: ChatTemplate) -> str:
    for name, (start, end) in REASONING_MARKS.items():
        if end in template.source:
            try:
                prompt = template.render([{"role": "user", "content": "probed"}], {})
            except PenstockError:  # it refuses this message, or is broken, so the end of the prompt is unknown
                return name
            return OPENED_BY_PROMPT if name == "qwen3" and prompt.rstrip().endswith(start) else name
    return ""
