"""Schemas and other grammars whose outputs the tests judge by jsonschema and by Python."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested objects": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {"name": WORD, "home": {"type": "object", "properties": {"zip": {"type": "integer"}}}},
                "required": ["name", "home"],
            }
        },
        "required": ["user"],
    },
    "array with bounds": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "enum": {"enum": ["red", 7, None, True, 'a "quoted" word', "é\n"]},
    "const": {"type": "object", "properties": {"kind": {"const": "x"}, "n": {"const": 1}}, "required": ["kind", "n"]},
    "anyOf": {
        "anyOf": [
            {"type": "integer"},
            {"type": "object", "properties": {"a": WORD}, "required": ["a"]},
            {"enum": ["z"]},
        ]
    },
    "references": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"leaf": WORD, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "required": ["leaf", "next"],
            }
        },
    },
    "patterns": {
        "type": "object",
        "properties": {
            "phone": {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
            "code": {"type": "string", "pattern": "^(ab|cd){1,3}[^x]$"},
        },
        "required": ["phone", "code"],
    },
    "ranges": {
        "type": "object",
        "properties": {
            "percent": {"type": "integer", "minimum": 0, "maximum": 100},
            "angle": {"type": "number", "exclusiveMinimum": -180, "maximum": 180},
            "small": {"type": "number", "minimum": 0.25, "maximum": 0.75},
            "below": {"type": "integer", "exclusiveMaximum": 0},
        },
        "required": ["percent", "angle", "small", "below"],
    },
    "optional keys": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "additional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "required": ["a"],
    },
    "several types": {"type": ["integer", "null", "string"], "minimum": 3, "maxLength": 4, "minLength": 1},
    "formats": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}},
        "required": ["day", "id"],
    },
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 3},
        "maxItems": 3,
    },
    "lengths": {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 20},
            "t": {"type": "string", "minLength": 2, "maxLength": 9},
        },
        "required": ["s", "t"],
    },
    "odd keys": {
        "type": "object",
        "properties": {'a"b': {"type": "integer"}, "é\n": {"type": "null"}},
        "required": ['a"b', "é\n"],
    },
    "number of keys": {
        "type": "object",
        "additionalProperties": {"enum": [1]},
        "minProperties": 1,  # of two, both may have the same name
        "maxProperties": 3,
    },
    "what json escapes": {
        "type": "array",
        "prefixItems": [
            {"type": "string", "pattern": '^[^a-f]{2,5}\\."?\\\\$'},
            {"type": "string", "pattern": '^["\\\\\\n]{3}[^a].\\s[!-~]$'},
            {"type": "string", "pattern": "^[^\\W\\d]{2}[\\w.-]+@[a-c\\]x-]{2}\\u0041\\x42\\D\\/$"},
        ],
        "items": False,
        "minItems": 3,
    },
    "all of one": {"allOf": [{"type": "object", "properties": {"a": WORD}, "required": ["a"]}], "title": "annotated"},
}
REGEXES = [r"\d{3}-\d{4}", r"^(a|bc)+x?$", r"[A-F0-9]{8}", r"(?:yes|no|perhaps)[.!?]", r"a.{2}b", r"[^\d\s]{1,5}="]
CHOICES = [["yes", "no"], ["a", "ab", "abc"], ['with "quotes"', "back\\slash", "line\nbreak", "Zoë 🙂"]]
EBNF = 'root ::= "set " name " = " value ";"\nname ::= [a-z] [a-z0-9]{0,3}\nvalue ::= [0-9]+ | "nil"'
EBNF_AS_REGEX = r"set [a-z][a-z0-9]{0,3} = (?:[0-9]+|nil);"
TAG_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<call>",
            "content": {"type": "json_schema", "json_schema": TAG_SCHEMA},
            "end": "</call>",
        },
    }
)
LEGACY_TAG = json.dumps(
    {"structures": [{"begin": "<call>", "schema": TAG_SCHEMA, "end": "</call>"}], "triggers": ["<call"]}
)


def assert_valid(text: str, schema: dict[str, Any]) -> Any:
    """``text`` is JSON and ``schema`` allows it; returns its value."""
    value = json.loads(text)
    # The libraries know formats by their form alone: the 30th of February is a date.
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker(["uuid"]))
    return value
