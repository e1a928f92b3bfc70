"""Requests as programs sent them, recorded from Codex 0.171, opencode 1.18.33, qwen-code 0.15.10, Pydantic AI 2.68,
instructor 1.17 and LlamaIndex's OpenAILike 0.8.1.

Long texts are replaced by their length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.openai.endpoints import RESPONSES, decode
from penstock.producer.openai.prepared import Prepared

from .generating import prepare, prepare_to_store

FOLDER = Path(__file__).parent / "recorded"
ASSISTANT, TOOL, USER = "assistant", "tool", "user"


def recorded(name: str) -> tuple[str, dict[str, Any]]:
    request = json.loads((FOLDER / f"{name}.json").read_text())
    return request["path"], request["body"]


def prepared_of(path: str, body: dict[str, Any]) -> Prepared:
    return prepare_to_store(body).chat if path == RESPONSES else prepare(path, body)


@pytest.mark.parametrize(
    ("name", "ignored", "roles"),
    [
        ("codex-demo-turn1", ("client_metadata", "tools.web_search"), ["system", USER, USER]),
        ("codex-demo-turn2", ("client_metadata", "tools.web_search"), ["system", USER, USER, ASSISTANT, TOOL]),
        ("codex-gpt55-turn1", ("client_metadata", "tools.web_search"), ["system", USER, USER]),
        (
            "codex-custom-tool-result",
            ("client_metadata", "tools.web_search"),
            ["system", USER, USER, ASSISTANT, TOOL],
        ),
        (
            "codex-namespace-result",
            ("client_metadata", "tools.web_search"),
            ["system", USER, USER, ASSISTANT, TOOL],
        ),
        (
            "codex-reasoning-replay",
            ("client_metadata", "tools.web_search"),
            ["system", USER, USER, ASSISTANT, TOOL],
        ),
        ("codex-local-compaction", ("client_metadata",), ["system", USER, USER, ASSISTANT, TOOL, USER]),
        ("opencode-turn1", (), ["system", USER]),
        ("opencode-turn2", (), ["system", USER, ASSISTANT, TOOL]),
        ("qwen-turn1", (), ["system", USER, ASSISTANT, USER]),
        ("qwen-turn2", (), ["system", USER, ASSISTANT, USER, ASSISTANT, TOOL]),
        ("pydantic-ai-turn2", (), [USER, ASSISTANT, TOOL]),
        ("pydantic-ai-forced", (), [USER]),
        ("instructor-forced", (), [USER]),
        ("llama-index-turn2", (), [USER, ASSISTANT, TOOL]),
    ],
)
def test_recorded_requests_are_accepted(name: str, ignored: tuple[str, ...], roles: list[str]) -> None:
    path, body = recorded(name)
    assert decode(path, body).ignored == ignored
    prepared = prepared_of(path, body)
    assert prepared.params.max_tokens == body.get("max_tokens")
    messages: Any = prepared.prompts[0]
    assert [message["role"] for message in messages] == roles


@pytest.mark.parametrize("name", ["pydantic-ai-forced", "instructor-forced"])
def test_a_schema_sent_as_a_forced_call_is_enforced(name: str) -> None:
    grammar = prepared_of(*recorded(name)).params.structured_outputs
    assert grammar is not None
    assert '"city"' in json.dumps(grammar.json)


def test_a_namespace_and_its_calls_are_functions_of_the_model() -> None:
    chat: Any = prepared_of(*recorded("codex-namespace-result"))
    names = [tool["function"]["name"] for tool in chat.options["chat_template_kwargs"]["tools"]]
    assert "multi_agent_v1__spawn_agent" in names
    (call,) = chat.prompt[-2]["tool_calls"]
    assert call["function"] == {"name": "multi_agent_v1__spawn_agent", "arguments": '{"message": "say hi"}'}


def test_a_custom_tool_and_its_calls_are_functions_of_one_text() -> None:
    chat: Any = prepared_of(*recorded("codex-custom-tool-result"))
    tools = {tool["function"]["name"]: tool["function"] for tool in chat.options["chat_template_kwargs"]["tools"]}
    assert tools["apply_patch"]["parameters"]["required"] == ["input"]
    assert "<312 characters>" in tools["apply_patch"]["description"]
    assert tools["tool_search"]["parameters"]["type"] == "object"
    (call,) = chat.prompt[-2]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {
        "input": "*** Begin Patch\n*** Add File: hello.txt\n+hi\n*** End Patch\n"
    }


def test_reasoning_comes_back_to_the_model() -> None:
    chat: Any = prepared_of(*recorded("codex-reasoning-replay"))
    assert chat.prompt[-2]["reasoning_content"]
