"""The shape of ``structured_outputs`` is checked where it is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.errors import ValidationError
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import MAX_GRAMMAR_BYTES, MAX_GRAMMAR_NESTING, StructuredOutputsParams


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object"}},
        {"json": '{"type": "object"}', "disable_any_whitespace": True},
        {"json": nested(MAX_GRAMMAR_NESTING)},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True, "whitespace_pattern": " ?"},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
    ],
)
def test_one_grammar_is_fine_and_survives_the_wire(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    params.check_supported()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice"),
        ({"json": 3}, "structured_outputs.json"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": "{"}, "must be JSON"),
        ({"json": "{" * 100_000}, "must be JSON"),
        ({"json": '{"a":' * 60_000}, "structured_outputs.json"),
        ({"json": nested(MAX_GRAMMAR_NESTING + 1)}, "deep"),
        ({"json": {"a": object()}}, "JSON can say"),
        ({"json": {"a": "x" * MAX_GRAMMAR_BYTES}}, "bytes"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a\x00"}, "NUL"),
        ({"regex": "\ud800"}, "structured_outputs.regex must be text that UTF-8"),
        ({"json": {"a": ["\ud800"]}}, r"structured_outputs\.json\.a\[0\] must be text"),
        ({"json": '{"a": "\\ud800"}'}, "structured_outputs.json must be text"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["a"] * 10_001}, "10000"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "bytes"),
        ({"json_object": False}, "json_object must be True"),
        ({"structural_tag": "tag"}, "must be JSON"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern"),
    ],
)
def test_anything_else_is_refused_by_name(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        StructuredOutputsParams(**fields)


def test_incompatible_parameters_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    params = StructuredOutputsParams(regex="a", enable_in_reasoning=True)
    with pytest.raises(ValidationError, match=r"enable_in_reasoning=True holds from .* thinking_token_budget at None"):
        SamplingParams(structured_outputs=params, thinking_token_budget=5)
    with pytest.raises(ValidationError, match="enable_in_reasoning must be True, False or None, got 1"):
        StructuredOutputsParams(regex="a", enable_in_reasoning=1)  # type: ignore[arg-type]
    later = StructuredOutputsParams(regex="a")
    assert SamplingParams(structured_outputs=later, thinking_token_budget=5).structured_outputs is later
