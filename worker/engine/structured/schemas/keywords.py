"""The keywords of JSON Schema (2020-12), and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .....shared.errors import ValidationError
from .....shared.values.shown import shown

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
DEFINITIONS = ("$defs", "definitions")
IN_PLACE = ("anyOf", "oneOf", "allOf")
LISTS_OF_SCHEMAS = (*IN_PLACE, "prefixItems")
MAPS_OF_SCHEMAS = ("properties", "patternProperties")
SCHEMAS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
KEYWORDS_OF_TYPE = {
    "object": frozenset(
        {"properties", "patternProperties", "required", "additionalProperties", "unevaluatedProperties"}
        | {"minProperties", "maxProperties"}
    ),
    "array": frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset({*RANGES, "multipleOf"}),
}
TYPED = frozenset().union(*KEYWORDS_OF_TYPE.values())
# Neither library enforces these keywords. With the value False or None they constrain nothing.
UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "uniqueItems",
        "contains",
    }
    | {"minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef"}
)


def check_value(keyword: str, value: Any, place: str) -> None:
    """Check that ``keyword`` allows ``value``.

    Raises:
        ValidationError: it does not.
    """
    is_valid, expected = _VALUES.get(keyword, (None, ""))
    if is_valid is not None and not is_valid(value):
        raise ValidationError(f"{place}: {keyword} must be {expected}, got {shown(value)}")


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 2**31 and value == int(value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len(set(value)) == len(value)


def _is_type(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and _are_names(value) and all(name in TYPES for name in value)
    return isinstance(value, str) and value in TYPES


_A_SCHEMA = (_is_schema, "a JSON schema")
_A_NUMBER = (_is_number, "a finite number")
_A_COUNT = (_is_count, "a whole number from 0 to 2147483647")
_A_TEXT = (lambda value: isinstance(value, str), "a string")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of some, each once"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    "required": (_are_names, "a list of names, each once"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(
        LISTS_OF_SCHEMAS, (lambda value: _are_schemas(value) and bool(value), "a list of at least one JSON schema")
    ),
    "items": (_is_schema, "a JSON schema; a list of them is called prefixItems"),
    **dict.fromkeys(("additionalProperties", "unevaluatedItems", "unevaluatedProperties"), _A_SCHEMA),
    **dict.fromkeys((*MAPS_OF_SCHEMAS, *DEFINITIONS), (_are_named_schemas, "an object of JSON schemas")),
    **dict.fromkeys(RANGES, _A_NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _A_COUNT),
    **dict.fromkeys(("pattern", "format", "$ref"), _A_TEXT),
}
KNOWN = frozenset({*_VALUES, "const"})
