"""Grammars that begin behind the thinking: with either library, in mixed batches, under a budget, resumed anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.engine.core.engine_core import EngineCore

from .harness import ask, run

EOS = 2
# Logits that no token of the tokenizer has.
START, END = 270, 271
REGEX = "[0-9]{2}-[a-z]{2,4}"
BUDGET = 6
WAITS = {"regex": REGEX, "enable_in_reasoning": False}
# They would end the output within the thinking, and do end the thinking soon.
HURRIED = {"logit_bias": {EOS: 60.0, END: 59.0}}


def thinking(
    name: str, output: list[int] | None = None, *, is_inside: bool = False, **params: Any
) -> EngineCoreRequest:
    request = ask(name, params.pop("grammar", WAITS), output, think_token_ids=(START, END), **params)
    if is_inside:
        request.prompt_token_ids = [*request.prompt_token_ids, START]
    return request


def limited(name: str, output: list[int] | None = None, **params: Any) -> EngineCoreRequest:
    """It begins to think, and would begin again for ever."""
    return thinking(name, output, logit_bias={START: 100.0}, thinking_token_budget=BUDGET, **params)


@pytest.fixture
def answer_of(text_of: Callable[[EngineCoreOutput], str]) -> Callable[[list[int]], str]:
    return lambda token_ids: text_of(EngineCoreOutput("", token_ids))


def test_it_holds_behind_the_thinking_alone(core: EngineCore, answer_of: Callable[[list[int]], str]) -> None:
    requests = [
        thinking("inside", None, is_inside=True, **HURRIED),
        limited("begins"),
        limited("none left", is_inside=True),
        thinking("answers", logit_bias={START: -100.0}),
        thinking("at once", grammar={"regex": REGEX, "enable_in_reasoning": True}, is_inside=True),
        ask("plain", None, max_tokens=30),
    ]
    wholes = run(core, requests)
    assert all(whole.error is None for whole in wholes.values())
    assert len(wholes.pop("plain").new_token_ids) == 30
    thoughts: dict[str, list[int]] = {}
    for name, whole in wholes.items():
        tokens = whole.new_token_ids
        num_thought = tokens.index(END) + 1 if END in tokens else 0
        thoughts[name] = tokens[:num_thought]
        assert whole.finish_reason is FinishReason.STOP
        assert re.fullmatch(REGEX, answer_of(tokens[num_thought:])), name
        assert EOS not in thoughts[name]
    assert thoughts["begins"] == [START] * (1 + BUDGET) + [END]
    assert thoughts["none left"] == [START] * BUDGET + [END]
    assert thoughts["inside"]
    assert thoughts["answers"] == thoughts["at once"] == []


def test_it_is_resumed_within_the_thinking_and_within_the_answer(
    core: EngineCore, answer_of: Callable[[list[int]], str]
) -> None:
    (whole,) = run(core, [limited("whole")]).values()
    tokens = whole.new_token_ids
    resumed = run(core, [limited(str(cut), tokens[:cut]) for cut in range(len(tokens))])
    for cut, rest in resumed.items():
        assert rest.error is None, cut
        again = tokens[: int(cut)] + rest.new_token_ids
        end = again.index(END)
        assert again[: end + 1] == [START] * (1 + BUDGET) + [END]
        assert re.fullmatch(REGEX, answer_of(again[end + 1 :])), cut
        assert rest.finish_reason is FinishReason.STOP


def test_a_model_without_marks_cannot_wait(core: EngineCore) -> None:
    (refused,) = run(core, [ask("r", WAITS)]).values()
    assert refused.error is not None
    assert refused.error.message.startswith("structured_outputs.enable_in_reasoning=False needs a model with tokens")
