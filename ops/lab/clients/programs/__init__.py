"""The programs, one module each."""

from __future__ import annotations

from ..program import Program
from .ai_sdk import AI_SDK
from .anthropic_sdks import ANTHROPIC_JS, ANTHROPIC_PYTHON, LANGCHAIN_ANTHROPIC
from .claude_code import CLAUDE_CODE
from .codex import CODEX
from .openai_python import OPENAI_PYTHON

PROGRAMS: tuple[Program, ...] = (
    CODEX,
    CLAUDE_CODE,
    OPENAI_PYTHON,
    AI_SDK,
    ANTHROPIC_PYTHON,
    ANTHROPIC_JS,
    LANGCHAIN_ANTHROPIC,
)
