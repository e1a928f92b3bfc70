"""Anthropic's packages for Python and JavaScript, and LangChain's on top of the first."""

from __future__ import annotations

from ..program import Program, Try, scripted

_TRIES = ("message", "stream", "tools", "thinking")


def _tries(script: str, *names: str) -> tuple[Try, ...]:
    return tuple(scripted(name, script, name) for name in names or _TRIES)


ANTHROPIC_PYTHON = Program(
    "anthropic-python", ["anthropic", "pydantic"], "pip", _tries("anthropic_python.py", *_TRIES, "structured", "count")
)
ANTHROPIC_JS = Program(
    "anthropic-js", ["@anthropic-ai/sdk"], "npm", _tries("anthropic_js.mjs", "message", "stream", "tools")
)
LANGCHAIN_ANTHROPIC = Program(
    "langchain-anthropic",
    ["langchain-anthropic"],
    "pip",
    _tries("langchain_on_anthropic.py", "message", "stream", "tools"),
)
