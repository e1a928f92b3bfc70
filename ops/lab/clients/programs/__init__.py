"""The programs, one module each."""

from __future__ import annotations

from ..program import Program
from .ai_sdk import AI_SDK
from .codex import CODEX
from .openai_python import OPENAI_PYTHON

PROGRAMS: tuple[Program, ...] = (CODEX, OPENAI_PYTHON, AI_SDK)
