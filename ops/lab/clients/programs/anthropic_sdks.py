"""Anthropic's packages for Python and JavaScript, and LangChain's on top of the first."""

from __future__ import annotations

from ..program import Program, scripted

_FUNCTIONS = {
    "message": "whole_message",
    "stream": "stream_message",
    "tools": "use_tools",
    "thinking": "send_thinking",
    "structured": "fill_schema",
    "count": "count_prompt",
}
_COMMON = ("message", "stream", "tools")

ANTHROPIC_PYTHON = Program(
    "anthropic-python",
    ["anthropic"],
    "pip",
    [scripted(label, "anthropic_python.py", function) for label, function in _FUNCTIONS.items()],
)
ANTHROPIC_JS = Program(
    "anthropic-js",
    ["@anthropic-ai/sdk"],
    "npm",
    [scripted(label, "anthropic_js.mjs", label) for label in _COMMON],
)
LANGCHAIN_ANTHROPIC = Program(
    "langchain-anthropic",
    ["langchain-anthropic"],
    "pip",
    [scripted(label, "langchain_on_anthropic.py", label) for label in _COMMON],
)
