"""Writes a JSON schema for xgrammar, or refuses it.

xgrammar 0.2.8 looks at one keyword of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf`` and ``type``, and
at those that belong to the type. It says nothing about the others, or warns on its standard error. Strings with a
length it lets have raw control characters, and those with a pattern raw quotes too; both are rewritten. What is written
is one type at a time, with what xgrammar is known to hold to, and nothing else.
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
# Its integers have 64 bits; multiples beyond 1024 it leaves out.
_MAX_INTEGER = 2**63 - 2
_MAX_MULTIPLE = 1024
# A number in a range is written with six digits behind the point; its bounds are doubles.
_MAX_FRACTION_DIGITS = 6
_MAX_BOUND = 10**9
_INFERRED = {"object": {"properties"}, "array": {"items", "prefixItems"}}


def schema_for_xgrammar(schema: Any, where: str) -> Any:
    """A schema whose grammar allows nothing that ``schema`` does not.

    Objects have the properties that they list and, as in vLLM, no others unless ``additionalProperties`` says so.
    Arrays have all of ``prefixItems``.

    Raises:
        ValidationError: there is none; names the place, the keyword and the way out.
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
            return self._deciding(schema, deciding, place)
        types = self._types(schema, place)
        if "format" in schema and "string" in types:
            self._check_format(schema, place)
        written = [self._typed(name, schema, place) for name in types]
        return {"anyOf": written} if len(written) > 1 else written[0] if written else {}

    def _types(self, schema: Schema, place: str) -> list[str]:
        """The types it names, or the one that xgrammar infers."""
        named = schema.get("type")
        if named is None:
            found = [name for name, signs in _INFERRED.items() if signs & schema.keys()][:1]
            known = KEYWORDS_OF_TYPE[found[0]] if found else frozenset()
            if unnoticed := sorted(TYPED & schema.keys() - known):
                raise self._refuse(place, f"{unnoticed[0]} needs a type beside it")
            return found
        names = [named] if isinstance(named, str) else named
        return [name for name in names if name != "integer" or "number" not in names]

    def _typed(self, name: str, schema: Schema, place: str) -> Schema:
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

    def _deciding(self, schema: Schema, deciding: list[str], place: str) -> Schema:
        keyword, value = deciding[0], schema[deciding[0]]
        beside = [*deciding[1:], *sorted(TYPED & schema.keys())]
        if "type" in schema and not self._is_implied(schema, keyword):
            beside.append("type")
        if beside:
            raise self._refuse(
                place,
                f"xgrammar looks at {keyword} alone, and would pass over {', '.join(beside)} beside it; move that into "
                f"it{_BY_LLGUIDANCE}",
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
        written = [self._schema(branch, f"{place}/{keyword}/{index}") for index, branch in enumerate(value)]
        return {"anyOf": written} if len(written) > 1 else written[0]

    def _is_implied(self, schema: Schema, keyword: str) -> bool:
        """Whether whatever ``keyword`` allows has one of the types beside it."""
        named = schema["type"]
        names = frozenset([named] if isinstance(named, str) else named)
        if keyword in ("const", "enum"):
            values = schema["enum"] if keyword == "enum" else [schema["const"]]
            return all(_has_type(value, names) for value in values)
        if keyword == "$ref":
            return False
        branches = [self._document.resolve(branch) for branch in schema[keyword]]
        if "integer" in names and "number" not in names:
            return all(isinstance(branch, dict) and branch.get("type") == named for branch in branches)
        return all(types_of(self._document, branch) <= names for branch in branches)

    def _check_constant(self, value: Any, place: str) -> None:
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise self._refuse(
                place, f"{value} has more digits than xgrammar keeps of a constant; write it as a string"
            )
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._check_constant(item, place)

    def _define_number(self, written: Schema) -> Schema:
        """Refer to a definition of its own, so that ``number_rules`` knows the rules of numbers by their names."""
        name = self._numbers.setdefault(json.dumps(written), f"{NUMBER_NAME}{len(self._numbers)}")
        return {"$ref": f"#/$defs/{name}"}

    def _integer(self, schema: Schema, place: str) -> Schema:
        low, high = integer_bounds(schema)
        written: Schema = {"type": "integer"}
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
            written["multipleOf"] = int(multiple)
        written |= {keyword: bound for keyword, bound in (("minimum", low), ("maximum", high)) if bound is not None}
        return written

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

    def _check_format(self, schema: Schema, place: str) -> None:
        if schema["format"] not in PATTERNS:
            raise self._refuse(
                place,
                f"format {schema['format']!r} is not supported; known are {', '.join(sorted(PATTERNS))}; say it in a "
                f"pattern, or leave it out",
            )

    def _string(self, schema: Schema, place: str) -> Schema:
        rules = [keyword for keyword in ("pattern", "format") if keyword in schema]
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        if len(rules) == 2 or (rules and lengths):
            beside = [*rules, *lengths][1]
            raise self._refuse(
                place, f"xgrammar passes over {beside} beside {rules[0]}; say it in the pattern{_BY_LLGUIDANCE}"
            )
        if rules:
            pattern = schema["pattern"] if rules == ["pattern"] else PATTERNS[schema["format"]]
            return {"type": "string", "pattern": text_in_json(pattern, f"{self._document.where}: {place}")}
        if not lengths:
            return {"type": "string"}
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        if most != "" and most < least:
            raise self._refuse(place, f"minLength and maxLength must be ascending, got {least} and {most}")
        return {"type": "string", "pattern": f"{ANY_CHARACTER_IN_JSON}{{{least},{most if most == '' else int(most)}}}"}

    def _array(self, schema: Schema, place: str) -> Schema:
        prefix = [
            self._schema(item, f"{place}/prefixItems/{i}") for i, item in enumerate(schema.get("prefixItems", []))
        ]
        keyword = "items" if "items" in schema else "unevaluatedItems"
        # Without any of them xgrammar would allow the empty array alone.
        rest = schema.get(keyword, False if "prefixItems" in schema else {})
        written: Schema = {"type": "array", "items": rest and self._schema(rest, f"{place}/{keyword}")}
        if rest == {}:
            written["items"] = {}
        if prefix:
            written["prefixItems"] = prefix
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and most < max(least, len(prefix)):
            raise self._refuse(
                place,
                f"maxItems {most} is less than minItems {least}, or than the {len(prefix)} of prefixItems, all of "
                f"which xgrammar writes",
            )
        if least > len(prefix) and rest is False:
            raise self._refuse(place, f"minItems is {least}, and no more than {len(prefix)} items are allowed")
        written["minItems"] = max(least, len(prefix))
        return written if most is None else {**written, "maxItems": int(most)}

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
        # Without any of them xgrammar would allow the empty object alone.
        rest = schema.get(keyword, False if "properties" in schema else {})
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if most is not None and most < max(least, len(required)):
            raise self._refuse(
                place, f"maxProperties {most} is less than minProperties {least}, or than what is required"
            )
        # What is not listed may come twice, and then counts once.
        if least > max(len(required), len(properties) if rest is False else 1):
            raise self._refuse(
                place,
                f"minProperties {least} is more than properties, or required where others are allowed, make sure of; "
                f"require them by name",
            )
        written: Schema = {"type": "object"}
        if properties:
            written["properties"] = {
                name: self._schema(child, f"{place}/properties/{name}") for name, child in properties.items()
            }
        if required:
            written["required"] = required
        others = False if rest is False else self._schema(rest, f"{place}/{keyword}")
        written["additionalProperties"] = False if properties else others
        if properties and others is not False:
            written["patternProperties"] = {other_names(properties): others}
        if least:
            written["minProperties"] = least
        return written if most is None else {**written, "maxProperties": int(most)}


_STEP = decimal_of(10) ** -_MAX_FRACTION_DIGITS


def _has_type(value: Any, names: frozenset[str]) -> bool:
    if type_of(value) in names:
        return True
    return "integer" in names and type_of(value) == "number" and canonical(value) == json.dumps(int(value))
