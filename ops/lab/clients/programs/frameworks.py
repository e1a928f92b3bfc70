"""Frameworks for Python that call chat completions, most of them through OpenAI's package."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Program, scripted

_COMMON = ("chat", "stream", "tools", "structured")


def _framework(name: str, packages: Sequence[str], script: str, *further: str) -> Program:
    labels = (*_COMMON, *further)
    return Program(name, packages, "pip", [scripted(label, script, label) for label in labels])


FRAMEWORKS = (
    _framework(
        "langchain-openai",
        ["langchain-openai"],
        "langchain_on_openai.py",
        "structured by tool",
        "responses",
        "embeddings",
    ),
    _framework(
        "llama-index",
        ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
        "llama_index_like.py",
        "structured by tool",
        "embeddings",
    ),
    _framework("litellm", ["litellm"], "litellm_tries.py", "hosted_vllm", "responses", "messages", "embeddings"),
    _framework(
        "pydantic-ai",
        ["pydantic-ai-slim[openai,anthropic]"],
        "pydantic_ai_tries.py",
        "structured by tool",
        "responses",
        "messages",
        "embeddings",
    ),
    Program(
        "instructor",
        ["instructor"],
        "pip",
        [
            scripted(label, "instructor_modes.py", label)
            for label in ("tools", "tools stream", "json", "json schema", "markdown json")
        ],
    ),
)
