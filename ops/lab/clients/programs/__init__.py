"""The programs, one module each."""

from __future__ import annotations

from ..program import Program
from .ai_sdk import AI_SDK
from .anthropic_sdks import ANTHROPIC_JS, ANTHROPIC_PYTHON, LANGCHAIN_ANTHROPIC
from .claude_code import CLAUDE_CODE
from .codex import CODEX
from .frameworks import FRAMEWORKS
from .openai_sdks import OPENAI_JS, OPENAI_PYTHON
from .opencode import OPENCODE
from .qwen_code import QWEN_CODE

PROGRAMS: tuple[Program, ...] = (
    CODEX,
    CLAUDE_CODE,
    OPENCODE,
    QWEN_CODE,
    OPENAI_PYTHON,
    OPENAI_JS,
    AI_SDK,
    ANTHROPIC_PYTHON,
    ANTHROPIC_JS,
    LANGCHAIN_ANTHROPIC,
    *FRAMEWORKS,
)
