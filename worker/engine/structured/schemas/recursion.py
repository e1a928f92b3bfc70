"""Refuses recursive schemas whose values would never end."""

from __future__ import annotations

from typing import Any

from .....shared.errors import ValidationError
from .disjoint import types_of
from .document import Document, Schema
from .keywords import IN_PLACE


def check_recursion(document: Document) -> Document:
    """Return ``document`` if every definition has a finite value, and none refers directly to itself.

    Raises:
        ValidationError: a definition refers to itself without an object or array between, or a definition or the root
            has no finite value.
    """
    for name, schema in document.definitions.items():
        if name in _reached_in_place(schema, document):
            raise ValidationError(
                f"{document.where}: {document.places[name]} refers to itself with nothing between; "
                f"put an object or an array there"
            )
    finite: set[str] = set()
    while new_names := {
        n for n, s in document.definitions.items() if n not in finite and _is_finite(s, finite, document)
    }:
        finite |= new_names
    endless = [document.places[name] for name in document.definitions if name not in finite]
    if endless or not _is_finite(document.root, finite, document):
        raise ValidationError(
            f"{document.where}: {(endless or ['#'])[0]} has no value that ends: its parts exclude each other, or "
            f"it needs itself within itself; make a property on the way optional, or allow null there"
        )
    return document


def _reached_in_place(schema: Any, document: Document) -> set[str]:
    """Return the definitions that apply, or may apply, to a value of ``schema`` itself and not to a part of it."""
    reached: set[str] = set()
    unseen = [schema]
    while unseen:
        part = unseen.pop()
        if not isinstance(part, dict):
            continue
        for keyword in IN_PLACE:
            unseen += part.get(keyword, [])
        name = part.get("$ref")
        if name is not None and name not in reached:
            reached.add(name)
            unseen.append(document.definitions[name])
    return reached


def _is_finite(schema: Any, finite: set[str], document: Document) -> bool:
    """Return whether ``schema`` has a finite value, given that the definitions ``finite`` have one."""
    if not isinstance(schema, dict):
        return True
    if not types_of(document, schema):  # it has no value at all
        return False
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(_is_finite(part, finite, document) for part in schema.get("allOf", [])):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_is_finite(part, finite, document) for part in schema[keyword]):
            return False
    type_value = schema.get("type", ())
    kinds = {"object": _is_finite_object, "array": _is_finite_array}
    results = [kinds[name](schema, finite, document) if name in kinds else True for name in _listed(type_value)]
    # xgrammar treats a schema with keywords of objects or arrays as an object or an array.
    return any(results) if results else all(is_kind(schema, finite, document) for is_kind in kinds.values())


def _listed(type_value: str | list[str]) -> list[str]:
    return [type_value] if isinstance(type_value, str) else list(type_value)


def _is_finite_object(schema: Schema, finite: set[str], document: Document) -> bool:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    return all(_is_finite(properties.get(name, rest), finite, document) for name in schema.get("required", []))


def _is_finite_array(schema: Schema, finite: set[str], document: Document) -> bool:
    prefix, count = schema.get("prefixItems", []), int(schema.get("minItems", 0))
    # xgrammar writes all of prefixItems.
    needed = [*prefix, *([schema.get("items", {})] if count > len(prefix) else [])]
    return all(_is_finite(item, finite, document) for item in needed)
