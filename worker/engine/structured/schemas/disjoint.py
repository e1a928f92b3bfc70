"""Whether alternatives exclude each other, so that ``oneOf`` of them is ``anyOf``."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from .document import Document, Schema
from .keywords import TYPES

_ALL = frozenset(name for name in TYPES if name != "integer")
DECIDING = ("const", "enum", "anyOf", "oneOf", "allOf")


def first_overlap(document: Document, alternatives: list[Any]) -> tuple[int, int] | None:
    """The first two of ``alternatives`` that may allow the same value."""
    for (i, one), (j, other) in combinations(enumerate(alternatives), 2):
        if not _are_disjoint(document, one, other):
            return i, j
    return None


def types_of(document: Document, schema: Any) -> frozenset[str]:
    """The types that a value of ``schema`` can have, integers as numbers; none if its parts exclude each other."""
    if schema is False:
        return frozenset()
    types = _ALL
    if (named := schema.get("type")) is not None:
        names = [named] if isinstance(named, str) else named
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
    """The type of a value, integers as numbers."""
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def canonical(value: Any) -> str:
    """A text that is equal for values that JSON Schema takes for equal: 1 and 1.0 are."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _are_disjoint(document: Document, one: Any, other: Any) -> bool:
    """Whether no value can be valid for both, as far as is seen from types, constants and a discriminating property."""
    one, other = document.resolve(one), document.resolve(other)
    types, other_types = types_of(document, one), types_of(document, other)
    if not types & other_types:
        return True
    values, other_values = _constants(one), _constants(other)
    if values is not None and other_values is not None:
        return not values & other_values
    if types != {"object"} or other_types != {"object"}:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    return any(_are_disjoint(document, _property(one, name), _property(other, name)) for name in shared)


def _property(schema: Schema, name: str) -> Any:
    return schema.get("properties", {}).get(name, {})


def _constants(schema: Schema) -> frozenset[str] | None:
    """The values it allows, if it lists them."""
    if "const" in schema:
        return frozenset([canonical(schema["const"])])
    if "enum" in schema:
        return frozenset(map(canonical, schema["enum"]))
    return None
