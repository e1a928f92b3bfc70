"""Writes a JSON schema for llguidance, or refuses it.

llguidance 1.9.1 merges ``$ref``, ``allOf`` and similar keywords with the other keywords of the same schema, and refuses
unknown keywords. It reads numbers as doubles and formats more loosely than the standard. Where additional properties
are allowed, it also accepts a listed name that is spelled with escapes.
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

# Doubles represent all integers exactly up to this one.
_MAX_INTEGER = 2**53
_MIN_POSITIVE = 1e-9
# Limit of multipleOf without its decimal point, because an automaton has that many states.
_MAX_MULTIPLE = 10_000
# Each character has exactly one spelling, so that a listed name has no other.
_ESCAPES = 'nrbtf\\"'


def schema_for_llguidance(schema: Any, where: str) -> Schema:
    """Return a schema whose grammar allows nothing that ``schema`` forbids.

    Raises:
        ValidationError: no such schema exists. The message names the place, the keyword and a remedy.
    """
    document = check_recursion(read_schema(schema, where, "llguidance"))
    writer = _Writer(document)
    root = writer.write(document.root, "#")
    definitions = {name: writer.write(child, document.places[name]) for name, child in document.definitions.items()}
    result = {**root, "$defs": definitions} if definitions else root
    return {**result, "x-guidance": {"json_allowed_escapes": _ESCAPES}}


_REPLACEMENTS = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}


class _Writer:
    def __init__(self, document: Document) -> None:
        self._document = document

    def _refuse(self, place: str, reason: str) -> ValidationError:
        return ValidationError(f"{self._document.where}: {place}: {reason}")

    def write(self, schema: Any, place: str) -> Any:
        """Return ``schema`` and all its subschemas as llguidance reads them."""
        if schema is False:
            return False
        for keyword in _REPLACEMENTS.keys() & schema.keys():
            raise self._refuse(place, f"{keyword} is not supported by llguidance; say it by {_REPLACEMENTS[keyword]}")
        self._check_values(schema, place)
        result = {keyword: self._value(keyword, value, place) for keyword, value in schema.items()}
        if "oneOf" in schema and first_overlap(self._document, schema["oneOf"]) is None and "anyOf" not in schema:
            result["anyOf"] = result.pop("oneOf")
        if "format" in schema:
            self._write_format(result, place)
        if "patternProperties" in schema:
            self._write_names(result, place)
        _write_zero(result)
        if "multipleOf" in schema:
            _write_bounds(result)
        return result

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
        # An unlisted property may occur twice, and then counts once.
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

    def _check_value(self, value: Any, place: str) -> None:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                self._check_value(item, place)
        elif isinstance(value, str) and not is_written(value):
            raise self._refuse(place, f"{shown(value)} has a control character, which llguidance does not write")
        elif isinstance(value, int | float) and abs(value) > _MAX_INTEGER:
            raise self._refuse(
                place, f"{value} is not supported by llguidance, whose numbers are exact up to {_MAX_INTEGER} only"
            )

    def _write_names(self, result: Schema, place: str) -> None:
        """Convert the name patterns of ``patternProperties``.

        A name that no pattern matches is an additional property. So a converted pattern may match fewer names than the
        original only if additional properties are forbidden.
        """
        is_exact = result.get("additionalProperties") is not False
        at = f"{self._document.where}: {place}/patternProperties"
        patterns = result["patternProperties"]
        result["patternProperties"] = {
            anchored(name, at, must_be_exact=is_exact): child for name, child in patterns.items()
        }
        if len(result["patternProperties"]) < len(patterns):
            raise self._refuse(place, "patternProperties has two patterns that say the same; merge them")

    def _write_format(self, result: Schema, place: str) -> None:
        name = result.pop("format")
        types = result.get("type", "string")
        if "string" not in ([types] if isinstance(types, str) else types):
            return
        pattern = anchored(f"^{PATTERNS[name]}$", "")
        if "pattern" in result:
            result["allOf"] = [*result.get("allOf", []), {"pattern": pattern}]
        else:
            result["pattern"] = pattern


def _write_bounds(result: Schema) -> None:
    """Bound multiples, so that the limit on digits never forbids the only digits that complete a multiple."""
    if not result.keys() & {"minimum", "exclusiveMinimum"}:
        result["minimum"] = -_MAX_INTEGER
    if not result.keys() & {"maximum", "exclusiveMaximum"}:
        result["maximum"] = _MAX_INTEGER


def _write_zero(result: Schema) -> None:
    """Replace an excluded zero by ``_MIN_POSITIVE``, because llguidance allows zero up to a bound below 1."""
    if result.get("exclusiveMinimum", 1) == 0:
        del result["exclusiveMinimum"]
        result["minimum"] = max(result.get("minimum", 0), _MIN_POSITIVE)
    if result.get("exclusiveMaximum", 1) == 0:
        del result["exclusiveMaximum"]
        result["maximum"] = min(result.get("maximum", 0), -_MIN_POSITIVE)
