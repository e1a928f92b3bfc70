"""Grammars that are none, and outputs that do not fit theirs, end their own requests with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shared.messages.outcome import FinishReason
from penstock.worker.engine.core.engine_core import EngineCore

from .harness import ask, run


def test_delivered_tokens_that_do_not_fit_end_the_request(core: EngineCore) -> None:
    wholes = run(core, [ask("bad", {"choice": ["yes"]}, [100, 101]), ask("good", {"choice": ["yes"]})])
    error = wholes["bad"].error
    assert error is not None
    assert error.code == "structured_output_failed"
    assert wholes["good"].error is None


def bad_input(**grammar: str) -> dict[str, Any]:
    node = {"type": "tool_input", "tool": "note", "in_json": True, **grammar}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": node})}


BAD_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "structured_outputs.regex"),
    ({"regex": "a$b"}, "structured_outputs.regex"),
    ({"regex": r"(a)\1"}, "structured_outputs.regex"),
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"$ref": "#/$defs/missing"}}, "structured_outputs.json"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"grammar": "root ::= missing"}, "structured_outputs.grammar"),
    ({"structural_tag": '{"structures": 3, "triggers": ["<"]}'}, "structures"),
]


def test_an_invalid_grammar_is_refused_with_the_reason(core: EngineCore) -> None:
    requests = [ask(str(i), grammar) for i, (grammar, _) in enumerate(BAD_GRAMMARS)]
    wholes = run(core, [*requests, ask("good", {"choice": ["yes"]})])
    assert wholes["good"].error is None
    for i, (grammar, expected) in enumerate(BAD_GRAMMARS):
        error = wholes[str(i)].error
        assert error is not None, grammar
        assert error.code == "validation_error"
        assert not error.retryable
        assert expected in error.message
        assert "/project/cpp" not in error.message


def test_an_invalid_input_of_a_tool_is_refused_by_its_name(make: Callable[..., EngineCore]) -> None:
    bad = [bad_input(syntax="lark", definition="start: a"), bad_input(syntax="regex", definition="(a")]
    for output in run(make(), [ask(str(i), grammar) for i, grammar in enumerate(bad)]).values():
        assert output.error is not None
        assert output.error.code == "validation_error"
        assert output.error.message.startswith("structured_outputs.structural_tag: the grammar of 'note'")


def test_a_grammar_without_an_end_is_refused(make: Callable[..., EngineCore]) -> None:
    (output,) = run(make(), [ask("endless", {"grammar": "root ::= root"})]).values()
    assert output.error is not None
    assert "neither a further token nor the end" in output.error.message


def test_a_compiled_grammar_is_compiled_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    run(core, [ask("first", {"regex": "x{3}"})])
    grammars: Any = core._grammars
    monkeypatch.setattr(grammars, "_compile", lambda spec: pytest.fail("compiled again"))
    (output,) = run(core, [ask("second", {"regex": "^x{3}$"})]).values()
    assert output.finish_reason is FinishReason.STOP


def test_structured_output_is_refused_for_a_model_without_token_bytes(make_core: Callable[..., EngineCore]) -> None:
    wholes = run(make_core("llama"), [ask("words", {"regex": "a"}), ask("plain", None, max_tokens=3)])
    error = wholes["words"].error
    assert error is not None
    assert error.code == "unsupported_parameter"
    assert wholes["plain"].error is None
