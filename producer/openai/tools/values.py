"""Write values that a model gave as bare text as JSON, by the schema of their parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_TYPE_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_MAX_REFERENCES = 16


def json_string(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return ``text`` as a part of a JSON string."""
    return json_string(text)[1:-1]


class Schemas:
    """The schema of an object and of its parts, whose references are resolved.

    Args:
        root: JSON schema of the arguments of a function; its ``$defs`` are those that references name.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def of_property(self, schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """Return the schema of the property ``key`` of an object; empty if it is unknown."""
        for option in self._options(schema):
            properties = option.get("properties")
            if isinstance(properties, Mapping) and isinstance(properties.get(key), Mapping):
                return properties[key]
        return self._first_mapping(schema, "additionalProperties")

    def of_items(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the schema of the items of a list; empty if it is unknown."""
        return self._first_mapping(schema, "items")

    def types(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the types that a value may have, in the order of the schema; empty if it names none."""
        types: dict[str, None] = {}
        for option in self._options(schema):
            kinds = option.get("type", [])
            types |= dict.fromkeys([kinds] if isinstance(kinds, str) else kinds)
            values = [*option.get("enum", []), *([option["const"]] if "const" in option else [])]
            types |= dict.fromkeys(_TYPE_NAMES[type(value)] for value in values)
        return list(types)

    def is_free_text(self, schema: Mapping[str, Any]) -> bool:
        """Whether a value is a string whatever its text, so that it can be passed on as it arrives."""
        options = list(self._options(schema))
        return self.types(schema) == ["string"] and not any("enum" in o or "const" in o for o in options)

    def json_of(self, text: str, schema: Mapping[str, Any]) -> str:
        """Return ``text`` as JSON of the first type that it fits, else as a string."""
        stripped = text.strip()
        if stripped in self._allowed_strings(schema):
            return json_string(stripped)
        types = self.types(schema)
        if "null" in types and stripped in ("null", "None"):
            return "null"
        for kind in types:
            if kind == "string":
                return json_string(text)
            if (value := _literal(stripped, kind)) is not None:
                return value
        return stripped if not types and _type_of(stripped) is not None else json_string(text)

    def _allowed_strings(self, schema: Mapping[str, Any]) -> list[str]:
        options = self._options(schema)
        values = [value for option in options for value in (*option.get("enum", []), option.get("const"))]
        return [value for value in values if isinstance(value, str)]

    def _first_mapping(self, schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        values = (option.get(key) for option in self._options(schema))
        return next((value for value in values if isinstance(value, Mapping)), {})

    def _options(self, schema: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield ``schema`` and all that it refers to or combines."""
        if depth == _MAX_REFERENCES:
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and (target := self._resolve(reference)) is not None:
            yield from self._options(target, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            for option in schema.get(key, ()):
                if isinstance(option, Mapping):
                    yield from self._options(option, depth + 1)

    def _resolve(self, reference: str) -> Mapping[str, Any] | None:
        node: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) and part else node
        return node if isinstance(node, Mapping) else None


def _literal(text: str, kind: str) -> str | None:
    """Return ``text`` as JSON of the type ``kind``; None if it is not."""
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower()
    actual = _type_of(text)
    return text if actual == kind or (actual, kind) == ("integer", "number") else None


def _type_of(text: str) -> str | None:
    """Return the type of the JSON value ``text``; None if it is not JSON."""
    try:
        return _TYPE_NAMES[type(json.loads(text, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)
