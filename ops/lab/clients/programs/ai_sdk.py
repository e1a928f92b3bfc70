"""Vercel's AI SDK, whose default provider for OpenAI speaks the Responses API and sends references to stored items."""

from __future__ import annotations

from ..program import Program, scripted

_TRIES = (
    "responses",
    "responses stream",
    "responses tools",
    "chat",
    "chat tools",
    "messages",
    "messages stream",
    "messages tools",
)
AI_SDK = Program(
    "ai-sdk",
    ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"],
    "npm",
    [scripted(label, "ai_sdk.mjs", label) for label in _TRIES],
)
