"""Schemas that grammars once let through, each refused or held to now; and common schemas, which are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.shared.errors import PenstockError
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.structured.constraint import GrammarConstraint, new_bitmask
from penstock.worker.engine.structured.grammar import Backend
from penstock.worker.engine.structured.loader import AutoBackend
from penstock.worker.engine.structured.spec import spec_of

from .walking import EOS, FORMATS, TOKENS, VOCABULARY, Judge, compiled, fault_of, load

INTEGER = {"type": "integer"}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load(request.param)


def fits(backend: Backend, schema: Any, text: str) -> bool:
    """Whether ``schema`` is accepted, and ``text`` an output of its grammar."""
    grammar = compiled(backend, schema)
    if grammar is None:
        return False
    output = grammar.start(frozenset([EOS]))
    token_ids = [TOKENS.index(bytes([byte])) for byte in text.encode()]
    return output.accept_tokens([*token_ids, EOS]) and output.is_terminated()


NEVER: list[tuple[Any, str]] = [
    ({"type": "string", "format": "json-pointer"}, '"/"/"'),
    ({"type": "string", "format": "relative-json-pointer"}, '"1/\n"'),
    ({"type": "string", "pattern": "^(?!a)[ab]$"}, '"a"'),
    ({"type": "string", "pattern": "a(?=b)[ab]"}, '"aa"'),
    ({"type": "string", "pattern": "^(?:b*a)?$"}, '"b"'),
    ({"type": "string", "pattern": r"^\D$"}, '"٣"'),
    ({"type": "integer", "multipleOf": 4096}, "4097"),
    ({"type": "integer", "multipleOf": 1.5}, "2"),
    ({"format": "date"}, '"x"'),
    ({"type": []}, "1"),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "1"),
    ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "[1]"),
    ({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ({"patternProperties": {r"^\d$": INTEGER}}, '{"٣":"x"}'),
    ({"patternProperties": {"^a|b$": INTEGER}}, '{"ax":"x"}'),
    ({"const": 2**63}, "9223372036854776000"),
    ({"properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}}, '{"a":1,"\\u0061":"x"}'),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, '{"a":1,"a":1}'),
    ({"type": "string", "format": "ipv4"}, '"256.1.1.1"'),
    ({"type": "string", "format": "ipv4"}, '"01.1.1.1"'),
    ({"type": "string", "format": "hostname"}, '"a-.b"'),
    ({"type": "string", "format": "date"}, '"2026-02-29"'),
    ({"type": "string", "format": "time"}, '"25:00:00Z"'),
    ({"anyOf": [{"type": "string"}], "x-guidance": {"lenient": True}, "not": {"const": "a"}}, '"a"'),
]


@pytest.mark.parametrize(("schema", "text"), NEVER, ids=str)
def test_forbidden_values_are_never_generated(backend: Backend, schema: Any, text: str) -> None:
    assert not fits(backend, schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {
            "oneOf": [
                {"allOf": [{"enum": [1]}, {"type": "string"}]},
                {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            ]
        },
        {"type": ["array"], "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"type": "array", "items": [INTEGER]},
        {"type": []},
        {"enum": []},
        {"$ref": "#/$defs/none"},
        {"type": "string", "pattern": "^(?!a)[ab]$"},
        {"type": "string", "format": "regex"},
        {"type": "integer", "minimum": 10**30},
    ],
    ids=str,
)
def test_it_is_refused_in_words(backend: Backend, schema: Any) -> None:
    with pytest.raises(PenstockError, match=r"^structured_outputs\.json") as refused:
        backend.compile(spec_of(StructuredOutputsParams(json=schema)))
    assert len(str(refused.value)) < 400
    assert "<state>" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "minimum": 1e-7, "maximum": 2e-7},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6},
        {"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001},
        {"type": "integer", "minimum": 0.5, "maximum": 1.5},
    ],
    ids=str,
)
def test_a_small_range_has_numbers_or_is_refused(backend: Backend, schema: Any) -> None:
    grammar = compiled(backend, schema)
    assert grammar is None or fault_of(grammar, schema) is None


def test_a_grammar_without_an_end_is_refused(backend: Backend) -> None:
    grammar = backend.compile(spec_of(StructuredOutputsParams(grammar="root ::= root"))).start(frozenset([EOS]))
    constraint = GrammarConstraint("", grammar, VOCABULARY.size, frozenset([EOS]))
    assert not constraint.fill(new_bitmask(1, VOCABULARY.size), 0)
    assert constraint.failure is not None
    assert constraint.failure.message == "structured_outputs: the grammar allows neither a further token nor the end"


# As zod 4 writes z.object({id: z.string().meta({format: "cuid"}), n: z.number().int(), extra: z.record(...)}), and
# pydantic a model with a path and a secret.
ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "cuid"},
        "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "extra": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
    },
    "required": ["id", "n"],
    "additionalProperties": False,
}
PYDANTIC = {
    "$defs": {"Kind": {"enum": ["a", "b"], "title": "Kind", "type": "string"}},
    "properties": {
        "path": {"format": "path", "title": "Path", "type": "string"},
        "secret": {"format": "password", "title": "Secret", "type": "string", "writeOnly": True},
        "kind": {"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}], "default": None},
    },
    "required": ["path", "secret"],
    "title": "Settings",
    "type": "object",
}


@pytest.mark.parametrize("schema", [ZOD, PYDANTIC], ids=["zod", "pydantic"])
def test_schemas_that_packages_write_are_accepted(backend: Backend, schema: Any) -> None:
    grammar = compiled(backend, schema)
    assert grammar is not None
    assert [fault_of(grammar, schema) for _ in range(5)] == [None] * 5


@pytest.mark.parametrize("name", sorted(FORMATS.checkers.keys() - {"regex"}))
def test_formats_follow_the_standard(backend: Backend, name: str) -> None:
    for schema in ({"type": "string", "format": name}, {"type": ["string", "null"], "format": name}):
        grammar = compiled(backend, schema)
        assert grammar is not None
        assert [fault_of(grammar, schema) for _ in range(5)] == [None] * 5


STRICT = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": ["string", "null"]}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "kind": {"type": "string", "enum": ["a", "b"], "description": "which"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["steps", "kind", "next"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
PYDANTIC = {
    "$defs": {
        "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
        "Address": {
            "description": "Where",
            "properties": {"street": {"maxLength": 40, "minLength": 1, "title": "Street", "type": "string"}},
            "required": ["street"],
            "title": "Address",
            "type": "object",
        },
        "Cat": {
            "properties": {"kind": {"const": "cat", "title": "Kind", "type": "string"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
            "title": "Cat",
            "type": "object",
        },
        "Dog": {
            "properties": {"kind": {"const": "dog", "title": "Kind", "type": "string"}},
            "required": ["kind"],
            "title": "Dog",
            "type": "object",
        },
    },
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "age": {
            "anyOf": [{"exclusiveMinimum": 0, "type": "integer"}, {"type": "null"}],
            "default": None,
            "title": "Age",
        },
        "born": {"format": "date-time", "title": "Born", "type": "string"},
        "id": {"format": "uuid", "title": "Id", "type": "string"},
        "color": {"$ref": "#/$defs/Color", "default": "red", "description": "of it"},
        "address": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None},
        "scores": {"additionalProperties": {"type": "number"}, "default": {}, "title": "Scores", "type": "object"},
        "pair": {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "title": "Pair",
            "type": "array",
        },
        "pet": {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "title": "Pet",
        },
        "price": {
            "anyOf": [{"type": "number"}, {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "type": "string"}],
            "title": "Price",
        },
        "ratio": {"exclusiveMinimum": 0, "maximum": 1, "title": "Ratio", "type": "number"},
        "any": {"title": "Any"},
    },
    "required": ["name", "born", "id", "pair", "pet", "price", "ratio"],
    "title": "Person",
    "type": "object",
}


@pytest.mark.parametrize("schema", [STRICT, PYDANTIC, PYDANTIC | {"additionalProperties": False}], ids=["a", "b", "c"])
def test_common_schemas_are_accepted(backend: Backend, schema: Any) -> None:
    grammar = compiled(backend, schema)
    assert grammar is not None
    assert fault_of(grammar, schema) is None
    value = {
        "name": "Zoë",
        "born": "2026-02-28T12:00:00Z",
        "id": "123e4567-e89b-12d3-a456-426614174000",
        "pair": [1, "a"],
        "pet": {"kind": "dog"},
        "price": "1.50",
        "ratio": 0.5,
    }
    if schema is not STRICT:
        text = json.dumps(value, ensure_ascii=False)
        assert Judge(schema).fault_of(text.encode()) is None
        assert fits(backend, schema, text)


def test_auto_takes_the_library_that_can() -> None:
    loaded: list[Backend] = []

    def load_second() -> Backend:
        loaded.append(load("llguidance"))
        return loaded[-1]

    backend = AutoBackend(load("xgrammar"), load_second)
    assert fits(backend, {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1}, '{"a": 1}')
    assert not loaded
    merged = {"allOf": [INTEGER, {"minimum": 3}]}
    assert fits(backend, merged, "3")
    assert not fits(backend, merged, "2")
    assert len(loaded) == 1
    with pytest.raises(PenstockError, match=r"uniqueItems.*other library"):
        backend.compile(spec_of(StructuredOutputsParams(json={"type": "array", "uniqueItems": True})))


@pytest.mark.parametrize("text", ['{"const": "\\ud800"}', {"const": "\ud800"}], ids=["as JSON", "as a dict"])
def test_half_a_character_is_refused_at_once(text: Any) -> None:
    with pytest.raises(PenstockError, match=r"structured_outputs\.json(\.const)? must be text that UTF-8 can encode"):
        StructuredOutputsParams(json=text)
