"""Structural tags: free text in which a trigger starts a part that follows a grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....shared.errors import ValidationError


def legacy_tags(description: dict[str, Any], field: str) -> list[tuple[str, Any, str]]:
    """Return (begin, schema, end) of each tag of the older form, ``{"structures": [...], "triggers": [...]}``.

    Raises:
        ValidationError: a field is missing or has the wrong type.
    """
    structures, triggers = description.get("structures"), description.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise ValidationError(f"{field}: triggers must be a list of non-empty strings, got {triggers!r}")
    if not isinstance(structures, list) or not structures:
        raise ValidationError(f"{field}: structures must be a list of tags, got {structures!r}")
    return [_legacy_tag(tag, triggers, field) for tag in structures]


def convert_schemas(node: Any, convert: Callable[[Any, str], Any], where: str) -> Any:
    """Return a copy of a structural tag's description with each JSON schema converted by ``convert(schema, place)``."""
    if isinstance(node, list):
        return [convert_schemas(item, convert, f"{where}/{index}") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    converted: dict[str, Any] = {}
    for key, value in node.items():
        place = f"{where}/{key}"
        converted[key] = convert(value, place) if key == "json_schema" else convert_schemas(value, convert, place)
    return converted


def _legacy_tag(tag: Any, triggers: list[str], field: str) -> tuple[str, Any, str]:
    if not isinstance(tag, dict):
        raise ValidationError(f"{field}: a tag of structures must be an object, got {tag!r}")
    begin, end = tag.get("begin"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(tag.get("schema"), dict | bool):
        raise ValidationError(f"{field}: a tag needs begin and end, strings, and schema, a JSON schema; got {tag!r}")
    if not any(begin.startswith(trigger) for trigger in triggers):
        raise ValidationError(f"{field}: begin must start with one of triggers, got {begin!r}")
    return begin, tag["schema"], end
