"""JSON schemas sent by callers: check their form, embed one in another, and translate ``response_format``.

Only the engine can tell whether its grammar library supports a schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...shared.errors import ValidationError
from ...shared.params.structured import StructuredOutputsParams, check_nesting
from ...shared.values.shown import shown

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not")
_VALUES = ("const", "enum", "default", "examples")

# The caller's name for the schema, which replaces the engine's in error messages.
SCHEMA_FIELD = "response_format.json_schema.schema"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_schema(schema: object, field: str) -> dict[str, Any]:
    """Return ``schema`` if it is a JSON schema.

    Raises:
        ValidationError: it is not; names the place below ``field``.
    """
    if not isinstance(schema, dict):
        raise ValidationError(f"{field} must be a JSON schema, an object, got {shown(schema)}")
    check_nesting(field, schema)
    _check_subschema(schema, field, schema)
    return schema


def embeddable(schema: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``schema`` in a form that can be embedded in another, and the definitions that the other needs for it.

    References point from the root of a document, so a schema with references moves to ``#/$defs/name`` as a whole.
    """
    moved = _rebase_references(schema, f"#/$defs/{name}")
    return (schema, {}) if moved == schema else ({"$ref": f"#/$defs/{name}"}, {name: moved})


def _check_subschema(schema: object, place: str, root: dict[str, Any]) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValidationError(f"{place} must be a JSON schema, an object, got {shown(schema)}")
    _check_keywords(schema, place, root)
    for key in _MAPS_OF_SCHEMAS:
        if key in schema:
            for name, child in _of_type(schema[key], dict, "an object", f"{place}.{key}").items():
                _check_subschema(child, f"{place}.{key}.{name}", root)
    for key in _LISTS_OF_SCHEMAS:
        if key in schema:
            children = _of_type(schema[key], list, "a list of schemas", f"{place}.{key}")
            if not children:
                raise ValidationError(f"{place}.{key} must have at least one schema")
            for position, child in enumerate(children):
                _check_subschema(child, f"{place}.{key}[{position}]", root)
    for key in _SCHEMAS:
        if key in schema:
            _check_subschema(schema[key], f"{place}.{key}", root)


def _check_keywords(schema: dict[str, Any], place: str, root: dict[str, Any]) -> None:
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or not all(isinstance(name, str) and name in _TYPES for name in types):
            raise ValidationError(
                f"{place}.type must be one or more of {', '.join(_TYPES)}, got {shown(schema['type'])}"
            )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValidationError(f"{place}.required must be a list of names, got {shown(required)}")
    if "enum" in schema and not _of_type(schema["enum"], list, "a list of values", f"{place}.enum"):
        raise ValidationError(f"{place}.enum must have at least one value")
    reference = schema.get("$ref")
    if reference is not None and not _is_resolvable(reference, root):
        raise ValidationError(f"{place}.$ref must point to a schema in the same document, got {shown(reference)}")


def _of_type(value: Any, kind: type, description: str, place: str) -> Any:
    if not isinstance(value, kind):
        raise ValidationError(f"{place} must be {description}, got {shown(value)}")
    return value


def _is_resolvable(reference: object, root: dict[str, Any]) -> bool:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return False
    node: Any = root
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            return False
    return isinstance(node, dict | bool)


def _rebase_references(node: Any, root: str) -> Any:
    """Return a copy of a schema, or of a list of schemas, whose references start at ``root`` instead of ``#``."""
    if isinstance(node, list):
        return [_rebase_references(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    moved: dict[str, Any] = {}
    for key, value in node.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            moved[key] = {name: _rebase_references(child, root) for name, child in value.items()}
        elif key == "$ref" and isinstance(value, str):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in _VALUES else _rebase_references(value, root)
    return moved


def structured_outputs_of(response_format: object) -> StructuredOutputsParams | None:
    """Return the grammar that enforces ``response_format``; None for text.

    JSON gets the fixed whitespace of ``json.dumps``, since a model restricted to a grammar may otherwise write
    whitespace forever. With ``strict``, objects have only the properties that their schema lists.

    Raises:
        ValidationError: it is not a response format; names the field.
    """
    if response_format is None:
        return None
    kind = _mapping(response_format, "response_format").get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = _mapping(response_format, "response_format").get("schema")
        if schema is not None:  # llama-server's and Together's form of a schema
            return _grammar(check_schema(schema, "response_format.schema"), "response_format.schema", is_strict=False)
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    if kind == "json_schema":
        return _grammar_of_schema(_mapping(response_format, "response_format").get("json_schema"))
    raise ValidationError(f"response_format.type must be 'text', 'json_object' or 'json_schema', got {shown(kind)}")


def _grammar_of_schema(description: object) -> StructuredOutputsParams:
    field = "response_format.json_schema"
    fields = _mapping(description, field)
    name = fields.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValidationError(f"{field}.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {shown(name)}")
    strict = fields.get("strict")
    if not isinstance(strict, bool | None):
        raise ValidationError(f"{field}.strict must be true or false, got {shown(strict)}")
    return _grammar(check_schema(fields.get("schema"), SCHEMA_FIELD), SCHEMA_FIELD, is_strict=bool(strict))


def _grammar(schema: dict[str, Any], field: str, *, is_strict: bool) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams(
            json=schema, disable_any_whitespace=True, disable_additional_properties=is_strict
        )
    except ValidationError as error:
        raise ValidationError(str(error).replace("structured_outputs.json", field)) from error


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValidationError(f"{field} must be an object, got {shown(value)}")
    return value
