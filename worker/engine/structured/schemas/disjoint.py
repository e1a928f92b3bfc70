"""Tests whether alternatives exclude each other, in which case ``oneOf`` means the same as ``anyOf``."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from .document import Document, Schema
from .keywords import TYPES

_ALL = frozenset(name for name in TYPES if name != "integer")
DECIDING = ("const", "enum", "anyOf", "oneOf", "allOf")


def first_overlap(document: Document, alternatives: list[Any]) -> tuple[int, int] | None:
    """Return the indexes of the first two ``alternatives`` that may allow the same value; None if all are disjoint."""
    for (i, first), (j, second) in combinations(enumerate(alternatives), 2):
        if not _are_disjoint(document, first, second):
            return i, j
    return None


def types_of(document: Document, schema: Any) -> frozenset[str]:
    """Return the types that a value of ``schema`` can have, integers as numbers.

    The result is empty if the parts of the schema exclude each other.
    """
    if schema is False:
        return frozenset()
    types = _ALL
    if (type_value := schema.get("type")) is not None:
        names = [type_value] if isinstance(type_value, str) else type_value
        types &= {"number" if name == "integer" else name for name in names}
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if "enum" in schema:
        types &= set(map(type_of, schema["enum"]))
    if "$ref" in schema:
        types &= types_of(document, document.definitions[schema["$ref"]])
    for part in schema.get("allOf", ()):
        types &= types_of(document, part)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            types &= frozenset().union(*(types_of(document, branch) for branch in schema[keyword]))
    return types


def type_of(value: Any) -> str:
    """Return the type of a value, integers as numbers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def canonical(value: Any) -> str:
    """Return a text that is equal for values that JSON Schema considers equal, such as 1 and 1.0."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _are_disjoint(document: Document, first: Any, second: Any) -> bool:
    """Return whether types, constants or a discriminating property prove that no value is valid for both."""
    first, second = document.resolve(first), document.resolve(second)
    types, second_types = types_of(document, first), types_of(document, second)
    if not types & second_types:
        return True
    values, second_values = _constants(first), _constants(second)
    if values is not None and second_values is not None:
        return not values & second_values
    if types != {"object"} or second_types != {"object"}:
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(_are_disjoint(document, _property(first, name), _property(second, name)) for name in shared)


def _property(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, {})


def _constants(schema: Schema) -> frozenset[str] | None:
    """Return the values that ``schema`` allows, if it lists them."""
    if "const" in schema:
        return frozenset([canonical(schema["const"])])
    if "enum" in schema:
        return frozenset(map(canonical, schema["enum"]))
    return None
