"""``response_format``: the required form of an answer, as in OpenAI's chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...shared.errors import ValidationError
from ...shared.params.structured import StructuredOutputsParams
from ...shared.shown import shown
from .json_schema import check_schema

# The caller's name for the schema, which replaces the engine's in error messages.
SCHEMA_FIELD = "response_format.json_schema.schema"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


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
    schema = check_schema(fields.get("schema"), SCHEMA_FIELD)
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
