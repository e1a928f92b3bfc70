"""How a model writes tool calls and reasoning, as far as its chat template shows it.

Names are those of the parsers in ``producer/openai`` (and of vLLM). A template shows how the model was trained, since
it renders what the model has said before.
"""

from __future__ import annotations

from typing import NamedTuple

from ...shared.errors import PenstockError
from ...shared.params.reasoning import REASONING_MARKS
from .chat_template import ChatTemplate

# Marks in a template -> parser; the first that fits counts.
_TOOL_CALLS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
)
# Qwen's Coder and GLM write XML inside of the same marks.
_NOT_HERMES = ("<function=", "<arg_key>")
# The parser of qwen3's marks, the first of which the prompt has.
OPENED_BY_PROMPT = "deepseek_r1"


class ChatStyle(NamedTuple):
    """Names of parsers; empty where the template shows nothing."""

    tool_call_parser: str = ""
    reasoning_parser: str = ""


def style_of(template: ChatTemplate) -> ChatStyle:
    """Return what ``template`` shows of its model."""
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
            except PenstockError:  # it wants other messages, or is broken: then nothing is known of the prompt's end
                return name
            return OPENED_BY_PROMPT if name == "qwen3" and prompt.rstrip().endswith(start) else name
    return ""
