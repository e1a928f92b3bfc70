"""Requests as Claude Code 2.1.197 sent them. Long texts are replaced by their length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.anthropic.errors import MESSAGES
from penstock.producer.openai.endpoints import decode
from penstock.producer.openai.parsers import Parsers

from ..openai.generating import template_kwargs

FOLDER = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("claude-turn1", ["system", "user", "system"]),
        ("claude-turn2", ["system", "user", "system", "assistant", "tool"]),
        ("claude-thinking-replay", ["system", "user", "system", "assistant", "tool"]),
    ],
)
def test_recorded_requests_become_chats(name: str, roles: list[str]) -> None:
    request = json.loads((FOLDER / f"{name}.json").read_text())
    assert request["path"].partition("?")[0] == MESSAGES
    decoded = decode(MESSAGES, request["body"])
    assert decoded.ignored == ("context_management",)
    prepared = decoded.prepare(Parsers())
    messages: Any = prepared.prompts[0]
    assert [message["role"] for message in messages] == roles
    kwargs = template_kwargs(prepared.options)
    assert len(kwargs["tools"]) == len(request["body"]["tools"])
    assert kwargs["reasoning_effort"] == "high"
    for message in messages[3:4]:
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["Write"]
        assert bool(message.get("reasoning")) == ("thinking" in name)
