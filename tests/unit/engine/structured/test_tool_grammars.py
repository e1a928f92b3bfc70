"""Constraints that hold an output to tool calls, in the syntax of the libraries of grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.producer.openai.json_schema import structured_outputs_of
from penstock.producer.openai.tools.definitions import ToolChoice, read_tools
from penstock.producer.openai.tools.forcing import NativeCalls, forced_json, native_calls
from penstock.shared.params.answer_formats import TOOL_CALL_FORMATS
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.structured.grammar import Backend
from penstock.worker.engine.structured.loader import load_backend
from penstock.worker.engine.structured.spec import spec_of

MODEL = Path(__file__).parents[4] / "ops" / "demo" / "model"
VOCAB_SIZE, EOS = 421, 2

# A schema that refers to itself and to a definition, one that is empty, and none.
TREE = {
    "type": "object",
    "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"$ref": "#/$defs/n"}},
    "required": ["left", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
FUNCTIONS = read_tools(
    [
        {"type": "function", "function": {"name": "tree", "parameters": TREE, "strict": True}},
        {"type": "function", "function": {"name": "now"}},
    ]
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, MODEL, VOCAB_SIZE, [EOS])


def hermes(*, is_parallel: bool = True) -> NativeCalls:
    native = native_calls(TOOL_CALL_FORMATS["hermes"].calls, FUNCTIONS, is_parallel=is_parallel)
    assert native is not None
    return native


class Held:
    """A constraint on outputs, with checks whether a text fits it."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, constraint: StructuredOutputsParams | None) -> None:
        assert constraint is not None
        self._grammar = backend.compile(spec_of(constraint)).start(frozenset([EOS]))
        self._tokenizer = tokenizer

    def accepts(self, text: str) -> bool:
        """Whether ``text``, with the whitespace in JSON that either library has, may be the whole output."""
        return any(map(self._accepts, (text, text.replace(", ", ",").replace(": ", ":"))))

    def begins_with(self, text: str) -> bool:
        """Whether an output may begin with ``text``."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._grammar.validate_tokens(token_ids) == token_ids

    def _accepts(self, text: str) -> bool:
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, EOS]
        return self._grammar.validate_tokens(token_ids) == token_ids


LISTS = {
    '[{"name": "tree", "parameters": {"left": {"left": null, "n": 1}, "n": 2}}]': True,
    '[{"name": "now", "parameters": {}}]': True,
    "[]": False,
    '[{"name": "then", "parameters": {}}]': False,
    '[{"name": "now", "parameters": {"n": 1}}]': False,
    '[{"name": "tree", "parameters": {"left": {"left": null}, "n": 2}}]': False,
}


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_list_of_calls_follows_the_schemas(backend: Backend, tokenizer: Tokenizer, is_parallel: bool) -> None:
    forced = forced_json(FUNCTIONS, ToolChoice("required"), is_parallel=is_parallel)
    outputs = Held(backend, tokenizer, forced)
    assert {text: outputs.accepts(text) for text in LISTS} == LISTS
    twice = {f"[{text[1:-1]}, {text[1:-1]}]": is_call and is_parallel for text, is_call in LISTS.items()}
    assert {text: outputs.accepts(text) for text in twice} == twice


def test_calls_in_free_text_follow_the_schemas_of_strict_functions(backend: Backend, tokenizer: Tokenizer) -> None:
    outputs = Held(backend, tokenizer, hermes().optional())
    calls = {
        ("tree", '{"left":null,"n":1}'): True,
        ("now", '{"any":1}'): True,  # it is not strict
        ("tree", '{"left":null}'): False,
        ("then", "{}"): False,
    }
    form = 'so <tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call> and'
    assert {call: outputs.begins_with(form.format(*call)) for call in calls} == calls


@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_is_json_or_calls(tokenizer: Tokenizer, is_parallel: bool) -> None:
    described: dict[str, Any] = {"name": "n", "schema": {"type": "object", "properties": {"n": {"const": 1}}}}
    answer = structured_outputs_of({"type": "json_schema", "json_schema": described})
    assert answer is not None
    either = hermes(is_parallel=is_parallel).or_answer(answer)
    checker = Held(load_backend("xgrammar", MODEL, VOCAB_SIZE, [EOS]), tokenizer, either)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    outputs = {'{"n": 1}': True, call: True, f"{call}\n{call}": is_parallel, "six": False}
    assert {text: checker.accepts(text) for text in outputs} == outputs
