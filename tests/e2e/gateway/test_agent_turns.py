"""Turns of a coding agent over the Messages API: scripted engines call tools, and one is killed within an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from penstock.ops.lab.clients import model_folder
from penstock.ops.lab.clients.answers import ANSWER, scripted_answer
from penstock.ops.lab.clients.deployment import killing_an_engine
from penstock.ops.lab.clients.scripted_server import ScriptedServer
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack

from ...processes import DEADLINE_S

RECORDED = Path(__file__).parents[2] / "unit" / "anthropic" / "recorded"
# As Qwen 3.5: a system message must be the first.
ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)


class Engines:
    """Two scripted engines with a gateway, and the prompts that they were sent."""

    def __init__(self, folder: Path, exits: ExitStack) -> None:
        tokenizer = model_folder.write_model_folder(folder / "model")
        template = folder / "model" / "chat_template.jinja"
        template.write_text(ONLY_FIRST + template.read_text())
        self.prompts: list[str] = []
        self.servers = [ScriptedServer(tokenizer, self._record_prompt) for _ in range(2)]
        for server in self.servers:
            exits.callback(server.shut_down)
        each = [["--engine-url", server.address] for server in self.servers]
        options = ["--engine", "http", "--served-model-name", "demo"]
        self.stack = exits.enter_context(LocalStack(folder / "model", options, folder / "worker.log", of_each=each))
        self.gateway = exits.enter_context(LocalGateway(self.stack.url, [], folder / "gateway.log"))

    def _record_prompt(self, prompt: str, schema: dict[str, Any] | None) -> str:
        self.prompts.append(prompt)
        return scripted_answer(prompt, schema)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ExitStack() as exits:
        yield Engines(tmp_path_factory.mktemp("engines"), exits)


@pytest.fixture
def claude(engines: Engines) -> Iterator[Any]:
    url = engines.gateway.root_url
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=DEADLINE_S) as claude:
        yield claude


def test_recorded_turns_keep_their_prefix_under_a_template_that_refuses_later_system_messages(
    engines: Engines,
) -> None:
    bodies = [json.loads((RECORDED / f"claude-turn{i}.json").read_text())["body"] for i in (1, 2)]
    with httpx.Client(base_url=engines.gateway.root_url, timeout=DEADLINE_S) as http:
        for body, kind in zip(bodies, ("tool_use", "text"), strict=True):
            answered = http.post("/v1/messages?beta=true", json={**body, "model": "demo", "stream": False})
            assert answered.status_code == 200, answered.text
            assert answered.json()["content"][-1]["type"] == kind
    first, second = engines.prompts[-2:]
    assert "<system-reminder><313 characters></system-reminder>" in first
    prefix = first.rpartition("<|im_start|>assistant")[0]
    assert second.startswith(prefix)


def test_an_engine_killed_within_a_streamed_answer_is_not_visible(engines: Engines, claude: Any) -> None:
    messages = [{"role": "user", "content": "How much is four plus two?"}]
    with (
        killing_an_engine(engines.servers, engines.stack, attrgetter("worker_pid")),
        claude.messages.stream(model="demo", max_tokens=200, messages=messages) as stream,
    ):
        text = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert text == whole.content[0].text == ANSWER
    assert whole.stop_reason == "end_turn"
