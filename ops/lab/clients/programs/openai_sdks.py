"""OpenAI's packages."""

from __future__ import annotations

from ..program import Program, scripted

_COMMON = ("chat", "chat stream", "chat tools", "chat structured", "responses", "responses tools", "embeddings")
OPENAI_PYTHON = Program(
    "openai-python",
    ["openai"],
    "pip",
    [scripted(label, "openai_python.py", label) for label in (*_COMMON, "idempotency")],
)
OPENAI_JS = Program(
    "openai-js", ["openai", "zod"], "npm", [scripted(label, "openai_js.mjs", label) for label in _COMMON]
)
