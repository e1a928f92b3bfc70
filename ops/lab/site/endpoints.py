"""The pages of the gateway: each endpoint with its fields, from the OpenAPI document that the gateway serves."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....producer.gateway.app import OPERATIONS
from ....producer.gateway.operations import build_openapi
from ....shared.params.pooling import PoolingParams
from ....shared.params.sampling import SamplingParams
from ....shared.values.distribution import VERSION
from .tables import split_docstring, table

OBJECTS = "http_objects.md"
_DOCUMENT = build_openapi(OPERATIONS, VERSION)
_SCHEMAS: dict[str, dict[str, Any]] = _DOCUMENT["components"]["schemas"]
# Bodies have the fields of these classes, too.
_MEANINGS = {
    name: text
    for params in (PoolingParams, SamplingParams)
    for name, text in split_docstring(params.__doc__ or "")[1].items()
}
FIELDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())


def bodies() -> dict[str, dict[str, str]]:
    """Return the meanings of the fields of each request's body, by the names of its class and field."""
    names = {
        _target(content["schema"])
        for methods in _DOCUMENT["paths"].values()
        for operation in methods.values()
        for content in _request(operation).values()
    }
    return {name: {field: _meanings(name).get(field, "") for field in _SCHEMAS[name]["properties"]} for name in names}


def _meanings(name: str) -> dict[str, str]:
    _, documented = split_docstring(_SCHEMAS[name].get("description", ""))
    shared = FIELDS["any"] if name.endswith(("Body", "Upload")) else {}
    return _MEANINGS | shared | documented | FIELDS.get(name, {})


def endpoints() -> Iterator[str]:
    """Yield the lines of the page of all endpoints."""
    yield from (
        "# HTTP endpoints",
        "",
        "`penstock gateway` serves these endpoints, and describes them in `/openapi.json`.",
        f"[The gateway](../howto/gateway.md) explains their use. [HTTP objects]({OBJECTS}) lists fields of objects.",
        "",
    )
    for path, methods in _DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield from _operation(f"{method.upper()} {path}", operation)


def objects() -> Iterator[str]:
    """Yield the lines of the page of objects that bodies hold."""
    yield from ("# HTTP objects", "", "Objects in the bodies of [HTTP endpoints](http.md), by name.", "")
    for name in sorted(_SCHEMAS.keys() - bodies().keys(), key=_title):
        yield from (f"## {_title(name)}", "", *_struct(name))


def _request(operation: dict[str, Any]) -> dict[str, Any]:
    return operation.get("requestBody", {}).get("content", {})


def _operation(name: str, operation: dict[str, Any]) -> Iterator[str]:
    access = " No API key is needed." if operation.get("security") == [] else ""
    yield from (f"## {name}", "", f"{operation['summary']}.{access}", "")
    rows = [_parameter(parameter) for parameter in operation.get("parameters", ())]
    yield from table(("parameter", "in", "type", "meaning"), rows)
    for media, content in _request(operation).items():
        yield from (f"**Request**, `{media}`.", "", *_struct(_target(content["schema"])))
    answer = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
    kinds = [_media(*item) for item in answer["content"].items()]
    yield from (f"**Response**, {' or '.join(kinds)}.", "")
    failures = {status: answer for status, answer in operation["responses"].items() if not status.startswith("2")}
    yield from table(("status", "meaning"), [(status, answer["description"]) for status, answer in failures.items()])


def _media(name: str, content: dict[str, Any]) -> str:
    return f"`{name}`: {_type(content['schema'])}" if "$ref" in content.get("schema", {}) else f"`{name}`"


def _parameter(parameter: dict[str, Any]) -> tuple[str, ...]:
    kind = _type(parameter["schema"])
    return f"`{parameter['name']}`", parameter["in"], kind, parameter.get("description", "")


def _struct(name: str) -> Iterator[str]:
    """Yield the description and the fields of a schema."""
    schema = _SCHEMAS[name]
    yield from (split_docstring(schema.get("description", ""))[0], "")
    if "enum" in schema:
        yield from (f"One of {_type(schema)}.", "")
    meanings = _meanings(name)
    required = set(schema.get("required", ()))
    rows = [
        (f"`{field}`", _type(value), _default(value, field in required), meanings.get(field, ""))
        for field, value in schema.get("properties", {}).items()
    ]
    yield from table(("field", "type", "default", "meaning"), rows)


def _default(schema: dict[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    return f"`{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""


def _type(schema: dict[str, Any]) -> str:
    """Return the type of a field in words; null, which leaves a field out, is not mentioned."""
    if "$ref" in schema:
        title = _title(_target(schema))
        return f"[{title}]({OBJECTS}#{re.sub('[^a-z_0-9 ]', '', title.lower()).replace(' ', '-')})"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null") or "null"
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"list of {_type(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind


def _target(schema: dict[str, Any]) -> str:
    return schema["$ref"].rpartition("/")[2]


def _title(name: str) -> str:
    """Return the name of a class, with its module where two classes have the name."""
    module, _, title = name.replace("Page_", "Page of ").strip("_").rpartition(".")
    return f"{title} ({module.removeprefix('penstock.producer.')})" if module else title
