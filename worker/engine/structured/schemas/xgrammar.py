"""Writes a JSON schema for xgrammar, or refuses it.

xgrammar 0.2.8 reads one keyword of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf`` and ``type``, and the
keywords that belong to the type. It ignores the others, or warns about them on its standard error. It allows raw
control characters in strings with a length, and also raw quotes in strings with a pattern, so both are rewritten. The
result has one type per schema, with only the keywords that xgrammar is known to enforce.
"""

from __future__ import annotations

import json
from typing import Any

from .....shared.errors import ValidationError
from .disjoint import DECIDING, canonical, first_overlap, type_of, types_of
from .document import Document, Schema, read_schema
from .formats import PATTERNS
from .keywords import KEYWORDS_OF_TYPE, RANGES, TYPED
from .names import other_names
from .number_rules import NUMBER_NAME
from .numbers import decimal_of, integer_bounds, is_empty, num_fraction_digits, number_bounds
from .patterns import ANY_CHARACTER_IN_JSON, text_in_json
from .recursion import check_recursion

_BY_LLGUIDANCE = "; or let the engine run with --structured-outputs-backend auto"
# xgrammar has 64-bit integers, and ignores multiples beyond 1024.
_MAX_INTEGER = 2**63 - 2
_MAX_MULTIPLE = 1024
# xgrammar writes a number in a range with six digits after the decimal point; its bounds are doubles.
_MAX_FRACTION_DIGITS = 6
_MAX_BOUND = 10**9
_INFERRED = {"object": {"properties"}, "array": {"items", "prefixItems"}}


def schema_for_xgrammar(schema: Any, where: str) -> Any:
    """Return a schema whose grammar allows nothing that ``schema`` forbids.

    Objects have the properties that they list and, as in vLLM, no others unless ``additionalProperties`` says so.
    Arrays have all of ``prefixItems``.

    Raises:
        ValidationError: no such schema exists. The message names the place, the keyword and a remedy.
    """
    return _Writer(check_recursion(read_schema(schema, where, "xgrammar"))).write()


class _Writer:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._numbers: dict[str, str] = {}  # names of the definitions of numbers, by their schemas

    def write(self) -> Schema:
        document = self._document
        root = self._schema(document.root, "#")
        definitions = {n: self._schema(schema, document.places[n]) for n, schema in document.definitions.items()}
        definitions |= {name: json.loads(schema) for schema, name in self._numbers.items()}
        return {**root, "$defs": definitions} if definitions else root

    def _refuse(self, place: str, reason: str) -> ValidationError:
        return ValidationError(f"{self._document.where}: {place}: {reason}")

    def _schema(self, schema: Any, place: str) -> Schema:
        if schema is False:
            raise self._refuse(place, "false, which allows nothing, is not supported by xgrammar here; leave it out")
        deciding = [keyword for keyword in ("$ref", *DECIDING) if keyword in schema]
        if deciding:
            return self._write_deciding(schema, deciding, place)
        types = self._types(schema, place)
        alternatives = [self._write_type(name, schema, place) for name in types]
        return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0] if alternatives else {}

    def _types(self, schema: Schema, place: str) -> list[str]:
        """Return the types that ``schema`` names, or the type that xgrammar infers."""
        type_value = schema.get("type")
        if type_value is None:
            inferred_types = [name for name, signs in _INFERRED.items() if signs & schema.keys()][:1]
            type_keywords = KEYWORDS_OF_TYPE[inferred_types[0]] if inferred_types else frozenset()
            if other_keywords := sorted(TYPED & schema.keys() - type_keywords):
                raise self._refuse(place, f"{other_keywords[0]} needs a type beside it")
            return inferred_types
        names = [type_value] if isinstance(type_value, str) else type_value
        return [name for name in names if name != "integer" or "number" not in names]

    def _write_type(self, name: str, schema: Schema, place: str) -> Schema:
        if name == "integer":
            return self._define_number(self._integer(schema, place))
        if name == "number":
            return self._define_number(self._number(schema, place))
        if name == "string":
            return self._string(schema, place)
        if name == "array":
            return self._array(schema, place)
        if name == "object":
            return self._object(schema, place)
        return {"type": name}

    def _write_deciding(self, schema: Schema, deciding: list[str], place: str) -> Schema:
        keyword, value = deciding[0], schema[deciding[0]]
        ignored_keywords = [*deciding[1:], *sorted(TYPED & schema.keys())]
        if "type" in schema and not self._is_implied(schema, keyword):
            ignored_keywords.append("type")
        if ignored_keywords:
            raise self._refuse(
                place,
                f"xgrammar looks at {keyword} alone, and would pass over {', '.join(ignored_keywords)} beside it; "
                f"move that into it{_BY_LLGUIDANCE}",
            )
        if keyword == "$ref":
            return {"$ref": f"#/$defs/{value}"}
        if keyword in ("const", "enum"):
            for constant in value if keyword == "enum" else [value]:
                self._check_constant(constant, place)
            return {keyword: value}
        if keyword == "allOf" and len(value) > 1:
            raise self._refuse(
                place, f"allOf of several schemas is not supported by xgrammar; merge them into one{_BY_LLGUIDANCE}"
            )
        if keyword == "oneOf" and (overlap := first_overlap(self._document, value)) is not None:
            raise self._refuse(
                place,
                f"oneOf: the alternatives {overlap[0]} and {overlap[1]} may overlap, and xgrammar takes oneOf as "
                f"anyOf; use anyOf, or give each another type, or a required property with a const of its own",
            )
        alternatives = [self._schema(branch, f"{place}/{keyword}/{index}") for index, branch in enumerate(value)]
        return {"anyOf": alternatives} if len(alternatives) > 1 else alternatives[0]

    def _is_implied(self, schema: Schema, keyword: str) -> bool:
        """Return whether every value that ``keyword`` allows has one of the types in ``type``."""
        type_value = schema["type"]
        names = frozenset([type_value] if isinstance(type_value, str) else type_value)
        if keyword in ("const", "enum"):
            values = schema["enum"] if keyword == "enum" else [schema["const"]]
            return all(_has_type(value, names) for value in values)
        if keyword == "$ref":
            return False
        branches = [self._document.resolve(branch) for branch in schema[keyword]]
        if "integer" in names and "number" not in names:
            return all(isinstance(branch, dict) and branch.get("type") == type_value for branch in branches)
        return all(types_of(self._document, branch) <= names for branch in branches)

    def _check_constant(self, value: Any, place: str) -> None:
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise self._refuse(
                place, f"{value} has more digits than xgrammar keeps of a constant; write it as a string"
            )
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._check_constant(item, place)

    def _define_number(self, schema: Schema) -> Schema:
        """Define a number separately and return a reference, so that ``number_rules`` finds its rules by name."""
        name = self._numbers.setdefault(json.dumps(schema), f"{NUMBER_NAME}{len(self._numbers)}")
        return {"$ref": f"#/$defs/{name}"}

    def _integer(self, schema: Schema, place: str) -> Schema:
        low, high = integer_bounds(schema)
        result: Schema = {"type": "integer"}
        if low is not None and high is not None and low > high:
            raise self._refuse(place, f"minimum greater than maximum: no integer lies between {low} and {high}")
        if max(abs(low or 0), abs(high or 0)) > _MAX_INTEGER:
            raise self._refuse(place, f"a bound beyond {_MAX_INTEGER} is not supported by xgrammar; leave it out")
        if "multipleOf" in schema:
            multiple = decimal_of(schema["multipleOf"])
            if low is not None or high is not None or multiple > _MAX_MULTIPLE or multiple != int(multiple):
                raise self._refuse(
                    place,
                    f"multipleOf is supported by xgrammar for integers without a range only, whole and up to "
                    f"{_MAX_MULTIPLE}{_BY_LLGUIDANCE}",
                )
            result["multipleOf"] = int(multiple)
        result |= {keyword: bound for keyword, bound in (("minimum", low), ("maximum", high)) if bound is not None}
        return result

    def _number(self, schema: Schema, place: str) -> Schema:
        if "multipleOf" in schema:
            raise self._refuse(place, f"multipleOf is supported by xgrammar for integers only{_BY_LLGUIDANCE}")
        lower, upper = number_bounds(schema)
        if is_empty(lower, upper):
            raise self._refuse(place, "minimum greater than maximum: no number lies between them")
        for keyword in RANGES:
            bound = decimal_of(schema.get(keyword, 0))
            if abs(bound) > _MAX_BOUND or num_fraction_digits(bound) > _MAX_FRACTION_DIGITS:
                raise self._refuse(
                    place,
                    f"{keyword} {schema[keyword]!r}: xgrammar supports bounds up to {_MAX_BOUND} with at most "
                    f"{_MAX_FRACTION_DIGITS} digits behind the point; round it{_BY_LLGUIDANCE}",
                )
        if lower is not None and upper is not None and lower[1] and upper[1] and upper[0] - lower[0] <= _STEP:
            raise self._refuse(place, f"xgrammar writes no number between {lower[0]} and {upper[0]}{_BY_LLGUIDANCE}")
        return {"type": "number"} | {keyword: schema[keyword] for keyword in RANGES if keyword in schema}

    def _string(self, schema: Schema, place: str) -> Schema:
        rules = [keyword for keyword in ("pattern", "format") if keyword in schema]
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        if len(rules) == 2 or (rules and lengths):
            ignored_keyword = [*rules, *lengths][1]
            raise self._refuse(
                place,
                f"xgrammar passes over {ignored_keyword} beside {rules[0]}; say it in the pattern{_BY_LLGUIDANCE}",
            )
        if rules:
            pattern = schema["pattern"] if rules == ["pattern"] else PATTERNS[schema["format"]]
            return {"type": "string", "pattern": text_in_json(pattern, f"{self._document.where}: {place}")}
        if not lengths:
            return {"type": "string"}
        min_count, max_count = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        if max_count != "" and max_count < min_count:
            raise self._refuse(place, f"minLength and maxLength must be ascending, got {min_count} and {max_count}")
        return {
            "type": "string",
            "pattern": f"{ANY_CHARACTER_IN_JSON}{{{min_count},{max_count if max_count == '' else int(max_count)}}}",
        }

    def _array(self, schema: Schema, place: str) -> Schema:
        prefix = [
            self._schema(item, f"{place}/prefixItems/{i}") for i, item in enumerate(schema.get("prefixItems", []))
        ]
        keyword = "items" if "items" in schema else "unevaluatedItems"
        # Without any of these keywords xgrammar would allow only the empty array.
        rest = schema.get(keyword, False if "prefixItems" in schema else {})
        result: Schema = {"type": "array", "items": rest and self._schema(rest, f"{place}/{keyword}")}
        if rest == {}:
            result["items"] = {}
        if prefix:
            result["prefixItems"] = prefix
        min_count, max_count = int(schema.get("minItems", 0)), schema.get("maxItems")
        if max_count is not None and max_count < max(min_count, len(prefix)):
            raise self._refuse(
                place,
                f"maxItems {max_count} is less than minItems {min_count}, or than the {len(prefix)} of prefixItems, "
                f"all of which xgrammar writes",
            )
        if min_count > len(prefix) and rest is False:
            raise self._refuse(place, f"minItems is {min_count}, and no more than {len(prefix)} items are allowed")
        result["minItems"] = max(min_count, len(prefix))
        return result if max_count is None else {**result, "maxItems": int(max_count)}

    def _object(self, schema: Schema, place: str) -> Schema:
        if "patternProperties" in schema:
            raise self._refuse(
                place, f"patternProperties is not supported by xgrammar; list them as properties{_BY_LLGUIDANCE}"
            )
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        missing = [name for name in required if name not in properties]
        if missing:
            raise self._refuse(place, f"required names {missing[0]!r}, which properties does not have")
        keyword = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        # Without any of these keywords xgrammar would allow only the empty object.
        rest = schema.get(keyword, False if "properties" in schema else {})
        min_count, max_count = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if max_count is not None and max_count < max(min_count, len(required)):
            raise self._refuse(
                place, f"maxProperties {max_count} is less than minProperties {min_count}, or than what is required"
            )
        # An unlisted property may occur twice, and then counts once.
        if min_count > max(len(required), len(properties) if rest is False else 1):
            raise self._refuse(
                place,
                f"minProperties {min_count} is more than properties, or required where others are allowed, make sure "
                f"of; require them by name",
            )
        result: Schema = {"type": "object"}
        if properties:
            result["properties"] = {
                name: self._schema(child, f"{place}/properties/{name}") for name, child in properties.items()
            }
        if required:
            result["required"] = required
        others = False if rest is False else self._schema(rest, f"{place}/{keyword}")
        result["additionalProperties"] = False if properties else others
        if properties and others is not False:
            result["patternProperties"] = {other_names(properties): others}
        if min_count:
            result["minProperties"] = min_count
        return result if max_count is None else {**result, "maxProperties": int(max_count)}


_STEP = decimal_of(10) ** -_MAX_FRACTION_DIGITS


def _has_type(value: Any, names: frozenset[str]) -> bool:
    if type_of(value) in names:
        return True
    return "integer" in names and type_of(value) == "number" and canonical(value) == json.dumps(int(value))
