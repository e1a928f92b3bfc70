"""OpenAI's package for Python."""

from __future__ import annotations

from ..program import Program, scripted

_TRIES = ("chat", "chat stream", "chat tools", "chat structured", "responses", "responses tools", "idempotency")
OPENAI_PYTHON = Program(
    "openai-python", ["openai"], "pip", [scripted(label, "openai_python.py", label) for label in _TRIES]
)
