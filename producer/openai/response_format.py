"""``response_format``: the form of an answer, as OpenAI's chat completions take it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...shared.errors import ValidationError
from ...shared.params.structured import StructuredOutputsParams
from ...shared.shown import shown
from .json_schema import check_schema

# What the engine says of the grammar, and the caller's name for it.
SCHEMA_FIELD = "response_format.json_schema.schema"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def structured_outputs_of(response_format: object) -> StructuredOutputsParams | None:
    """Return what holds the output to ``response_format``; None for text.

    JSON has one kind of whitespace, that of ``json.dumps``: a model that is held to a grammar may else go on with it
    for ever. With ``strict`` no object has properties but those its schema lists.

    Raises:
        ValidationError: it is no response format; names the field.
    """
    if response_format is None:
        return None
    kind = _mapping(response_format, "response_format").get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    if kind == "json_schema":
        return _of_schema(_mapping(response_format, "response_format").get("json_schema"))
    raise ValidationError(f"response_format.type must be 'text', 'json_object' or 'json_schema', got {shown(kind)}")


def _of_schema(description: object) -> StructuredOutputsParams:
    field = "response_format.json_schema"
    described = _mapping(description, field)
    name = described.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValidationError(f"{field}.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {shown(name)}")
    strict = described.get("strict")
    if not isinstance(strict, bool | None):
        raise ValidationError(f"{field}.strict must be true or false, got {shown(strict)}")
    schema = check_schema(described.get("schema"), SCHEMA_FIELD)
    try:
        return StructuredOutputsParams(
            json=schema, disable_any_whitespace=True, disable_additional_properties=bool(strict)
        )
    except ValidationError as error:
        raise ValidationError(str(error).replace("structured_outputs.json", SCHEMA_FIELD)) from error


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValidationError(f"{field} must be an object, got {shown(value)}")
    return value
