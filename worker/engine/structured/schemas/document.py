"""Reads and checks a JSON schema, and keeps only the keywords that constrain values.

Each referenced schema becomes a definition with a number as its name. Annotations, and keywords and formats unknown to
JSON Schema, constrain nothing and are left out, so a library sees no keyword that was not checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from .....shared.errors import ValidationError
from .....shared.values.shown import shown
from .formats import PATTERNS
from .keywords import (
    DEFINITIONS,
    KNOWN,
    LISTS_OF_SCHEMAS,
    MAPS_OF_SCHEMAS,
    SCHEMAS,
    UNSUPPORTED,
    check_value,
)
from .patterns import anchored

Schema = dict[str, Any]
# The only format of JSON Schema without a pattern.
_UNSUPPORTED_FORMAT = "regex"


@dataclass
class Document:
    """A checked schema.

    Args:
        where: parameter that contains the schema, for messages.
        root: schema of the whole value; ``{}`` for True.
        definitions: referenced schemas, by the name in ``{"$ref": name}``.
        places: JSON pointers of the definitions in the original schema, by the same names.
    """

    where: str
    root: Schema
    definitions: dict[str, Schema] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def resolve(self, schema: Any) -> Any:
        """Follow ``schema`` while it consists of a reference only, and return the schema at the end."""
        while isinstance(schema, dict) and schema.keys() == {"$ref"}:
            schema = self.definitions[schema["$ref"]]
        return schema


def read_schema(schema: Any, where: str, library: str) -> Document:
    """Read ``schema`` and every schema that it refers to.

    Raises:
        ValidationError: it is not a JSON schema, or ``library`` does not enforce one of its keywords. The message names
            the place, the keyword and a remedy.
    """
    if not isinstance(schema, dict | bool):
        raise ValidationError(f"{where} must be a JSON schema, an object, got {shown(schema)}")
    return _Reader(schema, where, library).read()


class _Reader:
    def __init__(self, schema: Any, where: str, library: str) -> None:
        self._whole = schema
        self._where = where
        self._library = library
        self._names: dict[str, str] = {}
        self._unread: list[tuple[str, Any]] = []

    def read(self) -> Document:
        document = Document(self._where, {})
        root = self._read(self._whole, "#")
        if root is False:
            raise ValidationError(f"{self._where} allows nothing: false")
        document.root = root
        while self._unread:
            place, schema = self._unread.pop()
            name = self._names[place]
            document.places[name] = place
            definition = self._read(schema, place)
            # A definition cannot be left out, so it cannot be False.
            if definition is False:
                raise ValidationError(f"{self._where}: {place} allows nothing: false")
            document.definitions[name] = definition
        return document

    def _read(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return {} if schema else False
        result: Schema = {}
        for keyword, value in schema.items():
            self._check(keyword, value, place)
            if keyword in DEFINITIONS:
                for name, child in value.items():
                    self._name_of(f"{place}/{keyword}/{_escape(name)}", child)
            elif keyword in KNOWN and not (keyword == "format" and value not in PATTERNS):
                result[keyword] = self._read_value(keyword, value, place)
        return result

    def _check(self, keyword: str, value: Any, place: str) -> None:
        at = f"{self._where}: {place}"
        if keyword in UNSUPPORTED and value is not None and value is not False and not _allows_any_name(keyword, value):
            raise ValidationError(f"{at}: {keyword} is not supported by {self._library}, nor by another; leave it out")
        if keyword == "format" and value == _UNSUPPORTED_FORMAT:
            raise ValidationError(f"{at}: format {shown(value)} is not supported by {self._library}; leave it out")
        if keyword == "$id" and place != "#":
            raise ValidationError(f"{at}: $id is supported at the root only; refer to #/$defs/…")
        check_value(keyword, value, at)

    def _read_value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in MAPS_OF_SCHEMAS:
            return {name: self._read(child, f"{place}/{keyword}/{_escape(name)}") for name, child in value.items()}
        if keyword in LISTS_OF_SCHEMAS:
            return [self._read(child, f"{place}/{keyword}/{index}") for index, child in enumerate(value)]
        if keyword in SCHEMAS:
            return self._read(value, f"{place}/{keyword}")
        if keyword == "$ref":
            return self._refer(value, place)
        if keyword == "pattern":
            anchored(value, f"{self._where}: {place}")  # refused here even if the type makes it irrelevant
        return value

    def _refer(self, reference: str, place: str) -> str:
        at = f"{self._where}: {place}"
        if reference != "#" and not reference.startswith("#/"):
            raise ValidationError(f"{at}: $ref must be # or begin with #/, got {shown(reference)}")
        target = self._whole
        steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
        for step in steps:
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise ValidationError(f"{at}: $ref {shown(reference)} names nothing in this schema")
        if not isinstance(target, dict | bool):
            raise ValidationError(f"{at}: $ref {shown(reference)} must name a JSON schema, not {shown(target)}")
        return self._name_of("/".join(["#", *map(_escape, steps)]), target)

    def _name_of(self, place: str, schema: Any) -> str:
        if place not in self._names:
            self._names[place] = str(len(self._names))
            self._unread.append((place, schema))
        return self._names[place]


def _allows_any_name(keyword: str, value: Any) -> bool:
    """Return whether a ``propertyNames`` constrains nothing, as zod writes it for every record."""
    return keyword == "propertyNames" and value in (True, {}, {"type": "string"})


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
