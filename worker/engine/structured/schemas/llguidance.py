"""Writes a JSON schema for llguidance, or refuses it.

llguidance 1.9.1 merges what stands beside ``$ref``, ``allOf`` and the like, and refuses what it does not know. It
reads numbers as doubles, formats more loosely than the standard, and lets a name that is listed be spelled with
escapes where others are allowed.
"""

from __future__ import annotations

from typing import Any

from .....shared.errors import ValidationError
from .....shared.values.shown import shown
from .disjoint import first_overlap
from .document import Document, Schema, read_schema
from .formats import PATTERNS
from .keywords import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, RANGES, SCHEMAS
from .numbers import decimal_of, num_fraction_digits
from .patterns import anchored, is_written
from .recursion import check_recursion

# Doubles are exact up to it.
_MAX_INTEGER = 2**53
_LEAST_NUMBER = 1e-9
# Of multipleOf, without its point: an automaton has as many states.
_MAX_MULTIPLE = 10_000
# A character has one spelling, so that a name that is listed has no other.
_ESCAPES = 'nrbtf\\"'


def schema_for_llguidance(schema: Any, where: str) -> Schema:
    """A schema whose grammar allows nothing that ``schema`` does not.

    Raises:
        ValidationError: there is none; names the place, the keyword and the way out.
    """
    document = check_recursion(read_schema(schema, where, "llguidance"))
    writer = _Writer(document)
    root = writer.write(document.root, "#")
    definitions = {name: writer.write(child, document.places[name]) for name, child in document.definitions.items()}
    written = {**root, "$defs": definitions} if definitions else root
    return {**written, "x-guidance": {"json_allowed_escapes": _ESCAPES}}


_NOT_HELD_TO = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}


class _Writer:
    def __init__(self, document: Document) -> None:
        self._document = document

    def _refuse(self, place: str, reason: str) -> ValidationError:
        return ValidationError(f"{self._document.where}: {place}: {reason}")

    def write(self, schema: Any, place: str) -> Any:
        """One schema and all below it."""
        if schema is False:
            return False
        for keyword in _NOT_HELD_TO.keys() & schema.keys():
            raise self._refuse(place, f"{keyword} is not supported by llguidance; say it by {_NOT_HELD_TO[keyword]}")
        self._check_values(schema, place)
        written = {keyword: self._value(keyword, value, place) for keyword, value in schema.items()}
        if "oneOf" in schema and first_overlap(self._document, schema["oneOf"]) is None and "anyOf" not in schema:
            written["anyOf"] = written.pop("oneOf")
        if "format" in schema:
            self._write_format(written, place)
        if "patternProperties" in schema:
            self._write_names(written, place)
        _write_zero(written)
        if "multipleOf" in schema:
            _write_bounds(written)
        return written

    def _value(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in MAPS_OF_SCHEMAS:
            return {name: self.write(child, f"{place}/{keyword}/{name}") for name, child in value.items()}
        if keyword in LISTS_OF_SCHEMAS:
            return [self.write(child, f"{place}/{keyword}/{index}") for index, child in enumerate(value)]
        if keyword in SCHEMAS:
            return self.write(value, f"{place}/{keyword}")
        if keyword == "$ref":
            return f"#/$defs/{value}"
        if keyword == "pattern":
            return anchored(value, f"{self._document.where}: {place}")
        return value

    def _check_values(self, schema: Schema, place: str) -> None:
        for keyword in (*RANGES, "const", "enum"):
            if keyword in schema:
                self._check_value(schema[keyword], f"{place}: {keyword}")
        # What is not listed may come twice, and then counts once.
        if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
            raise self._refuse(
                place,
                f"minProperties {schema['minProperties']} is more than required makes sure of; require them by name",
            )
        if "multipleOf" in schema:
            multiple = decimal_of(schema["multipleOf"]).normalize()
            if int(multiple.scaleb(num_fraction_digits(multiple))) > _MAX_MULTIPLE:
                raise self._refuse(
                    place,
                    f"multipleOf {multiple} is not supported by llguidance, which knows up to {_MAX_MULTIPLE}, with or "
                    f"without a point; leave it out",
                )

    def _check_value(self, value: Any, what: str) -> None:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                self._check_value(item, what)
        elif isinstance(value, str) and not is_written(value):
            raise self._refuse(what, f"{shown(value)} has a control character, which llguidance does not write")
        elif isinstance(value, int | float) and abs(value) > _MAX_INTEGER:
            raise self._refuse(
                what, f"{value} is not supported by llguidance, whose numbers are exact up to {_MAX_INTEGER} only"
            )

    def _write_names(self, written: Schema, place: str) -> None:
        """What a pattern of names does not match is left to others; so it may match less only where there are none."""
        is_exact = written.get("additionalProperties") is not False
        at = f"{self._document.where}: {place}/patternProperties"
        named = written["patternProperties"]
        written["patternProperties"] = {
            anchored(name, at, must_be_exact=is_exact): child for name, child in named.items()
        }
        if len(written["patternProperties"]) < len(named):
            raise self._refuse(place, "patternProperties has two patterns that say the same; merge them")

    def _write_format(self, written: Schema, place: str) -> None:
        name = written.pop("format")
        types = written.get("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return
        if name not in PATTERNS:
            raise self._refuse(
                place,
                f"format {name!r} is not supported; known are {', '.join(sorted(PATTERNS))}; say it in a pattern, or "
                f"leave it out",
            )
        pattern = anchored(f"^{PATTERNS[name]}$", "")
        if "pattern" in written:
            written["allOf"] = [*written.get("allOf", []), {"pattern": pattern}]
        else:
            written["pattern"] = pattern


def _write_bounds(written: Schema) -> None:
    """Bound multiples, so that the limit of their digits never forbids the only ones that complete a multiple."""
    if not written.keys() & {"minimum", "exclusiveMinimum"}:
        written["minimum"] = -_MAX_INTEGER
    if not written.keys() & {"maximum", "exclusiveMaximum"}:
        written["maximum"] = _MAX_INTEGER


def _write_zero(written: Schema) -> None:
    """An excluded zero as the least number that is written: up to a bound below 1 the library lets zero in."""
    if written.get("exclusiveMinimum", 1) == 0:
        del written["exclusiveMinimum"]
        written["minimum"] = max(written.get("minimum", 0), _LEAST_NUMBER)
    if written.get("exclusiveMaximum", 1) == 0:
        del written["exclusiveMaximum"]
        written["maximum"] = min(written.get("maximum", 0), -_LEAST_NUMBER)
