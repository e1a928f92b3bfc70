"""No part of a JSON schema is passed over: a value that it forbids does not fit its grammar, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.shared.errors import ValidationError
from penstock.worker.engine.structured.grammar import Backend, CompiledGrammar
from penstock.worker.engine.structured.loader import load_backend
from penstock.worker.engine.structured.spec import GrammarKind, GrammarSpec

MODEL = Path(__file__).parents[4] / "ops" / "demo" / "model"
VOCAB_SIZE, EOS = 382, 2
INTEGER: dict[str, Any] = {"type": "integer"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, "a": INTEGER}, "required": ["kind", "a"]}
    for kind in ("x", "y")
]
# Schema, values that it allows, values that it forbids.
HONOURED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer", "multipleOf": 3}, [3], [4]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, [4], [3, 6]),
    ({"type": "number", "minimum": 0.5, "maximum": 1.5}, [0.5, 1.25], [0.4, 1.6, 2]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER], "items": {"type": "string"}}, [[1, "a"]], [[1, 2], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, [[1]], [[1, 2]]),
    ({"items": INTEGER}, [[1]], [["a"]]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "b", "aab"]),
    ({"type": "string", "pattern": '^"x\\\\\\n$'}, ['"x\\\n'], ["x"]),
    ({"type": "string", "format": "date"}, ["2026-11-21"], ["today"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["1"]),
    ({**OBJECT, "additionalProperties": False}, [{"a": 1}, {}], [{"c": 1}, {"a": "x"}]),
    ({**OBJECT, "required": ["a"]}, [{"a": 1, "b": 2}], [{}, {"b": 1}]),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}]),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2}, [{"x": 1}], [{}]),
    ({"anyOf": [INTEGER, {"type": "string"}]}, [1, "a"], [[], 1.5]),
    ({"oneOf": [INTEGER, {"type": "string"}, {"type": "null"}]}, [1, "a", None], [[]]),
    ({"allOf": [INTEGER]}, [1], ["a"]),
    ({"type": ["integer", "null"], "minimum": 3}, [4, None], [1, "a"]),
    ({"type": "string", "enum": ['a"b', "é", "\n"]}, ['a"b', "é", "\n"], ["x"]),
    ({"const": None, "title": "nothing", "description": "at all"}, [None], [0]),
    ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, [1], ["a"]),
    ({"enum": [{"not": 1}], "default": {"if": 2}}, [], [1]),
]
BY_XGRAMMAR_ALONE: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({**OBJECT, "minProperties": 1}, [{"a": 1}], [{}]),
    (OBJECT, [{"a": 1}], [{"c": 1}]),
    ({**OBJECT, "unevaluatedProperties": {"type": "string"}}, [{"a": 1, "c": "x"}], [{"c": 1}]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 3], [4]),
    ({"oneOf": TAGGED}, [{"kind": "x", "a": 1}, {"kind": "y", "a": 1}], [{"kind": "z", "a": 1}]),
]
REFUSED_BY_XGRAMMAR: list[tuple[Any, str]] = [
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 5}, "multipleOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER, "minContains": 2}, "contains"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "maxLength beside pattern"),
    ({"type": "string", "format": "email", "maxLength": 5}, "maxLength beside format"),
    ({"type": "string", "pattern": "^(a|^b)$"}, "inside the pattern"),
    ({"type": "string", "pattern": "\\x01"}, "in a JSON string"),
    ({"type": "object", "patternProperties": {"^a": INTEGER}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({**OBJECT, "required": ["z"]}, "'z'"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**OBJECT, "anyOf": [{"required": ["a"]}]}, "beside it"),
    ({"not": {"type": "string"}}, "not is not supported"),
    ({"if": INTEGER, "then": {"minimum": 3}}, "if is not supported"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "overlap"),
    ({"oneOf": [OBJECT, OBJECT]}, "overlap"),
    ({"allOf": [INTEGER, {"maximum": 5}]}, "allOf"),
    ({"type": "integer", "enum": [1, "a"]}, "type beside it"),
    ({"type": "string", "enum": ["abc"], "maxLength": 2}, "maxLength beside it"),
    ({"minimum": 3}, "needs a type"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, "minimum beside it"),
    ({"$ref": "https://example.com/schema"}, "\\$ref must be"),
    ({"$dynamicRef": "#a"}, "dynamicRef"),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": INTEGER}}}}, "#/properties/a/items"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "ascending"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
    ({"type": "strin"}, "strin"),
    ({"type": 7}, "structured_outputs.json"),
    ({"enum": []}, "enum"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, MODEL, VOCAB_SIZE, [EOS])


def compiled(backend: Backend, schema: Any) -> CompiledGrammar:
    return backend.compile(GrammarSpec(GrammarKind.JSON, json.dumps(schema)))


def fits(tokenizer: Tokenizer, grammar: CompiledGrammar, text: str) -> bool:
    output = grammar.start(frozenset([EOS]))
    return output.accept_tokens([*tokenizer.encode(text, add_special_tokens=False).ids, EOS]) and output.is_terminated()


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), HONOURED, ids=str)
def test_honoured(
    backend: Backend, tokenizer: Tokenizer, schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]
) -> None:
    grammar = compiled(backend, schema)
    for value in allowed:
        assert fits(tokenizer, grammar, json.dumps(value, ensure_ascii=False)), value
    for value in forbidden:
        assert not fits(tokenizer, grammar, json.dumps(value, ensure_ascii=False)), value


@pytest.fixture(scope="module")
def xgrammar_backend() -> Backend:
    return load_backend("xgrammar", MODEL, VOCAB_SIZE, [EOS])


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), BY_XGRAMMAR_ALONE, ids=str)
def test_honoured_by_xgrammar(
    xgrammar_backend: Backend, tokenizer: Tokenizer, schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]
) -> None:
    grammar = compiled(xgrammar_backend, schema)
    assert all(fits(tokenizer, grammar, json.dumps(value)) for value in allowed)
    assert not any(fits(tokenizer, grammar, json.dumps(value)) for value in forbidden)


@pytest.mark.parametrize(("schema", "reason"), REFUSED_BY_XGRAMMAR, ids=str)
def test_refused_by_xgrammar(xgrammar_backend: Backend, schema: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as refused:
        compiled(xgrammar_backend, schema)
    assert str(refused.value).startswith("structured_outputs.json")


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "string", "maxLength": 3}, {"type": "string", "pattern": ".*"}]
)
def test_a_string_never_has_characters_that_json_must_escape(
    backend: Backend, tokenizer: Tokenizer, schema: Any
) -> None:
    grammar = compiled(backend, schema)
    for char in [*map(chr, range(0x20)), "\\"]:
        assert not fits(tokenizer, grammar, f'"{char}"')
    assert not fits(tokenizer, grammar, '"""')
    assert fits(tokenizer, grammar, '"é🙂"')
