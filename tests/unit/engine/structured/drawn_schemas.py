"""JSON schemas at random, over every keyword: sensible ones, odd ones, and some that are no schemas."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("a", "b", "ab", 'q"', "é")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
CONSTANTS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    1.0,
    -1,
    2.5,
    1e-7,
    1e22,
    2**53 + 1,
    2**63,
    10**30,
    "",
    "a",
    "ab",
    'q"\\\n',
    "é🙂",
    "\x01",
    [],
    [1],
    [1.0, "a"],
    {},
    {"a": 1},
    {"a": 1.0, "b": [None]},
)
BOUNDS = (
    0,
    1,
    -1,
    3,
    5,
    7.5,
    -2.5,
    0.1,
    0.25,
    99,
    100,
    -180,
    1000,
    123456.789,
    1e-7,
    2e-7,
    1e-6,
    -1e-6,
    5e-324,
    1e22,
    1e-3,
    0.333333333,
    2**31,
    2**53,
    2**53 + 1,
    -(2**53) - 3,
    2**63 - 1,
    2**63,
    -(2**63),
    10**20,
    10**25,
    1e300,
)
MULTIPLES = (1, 2, 3, 7, 10, 1.0, 1.5, 0.5, 0.1, 0.01, 1e-7, 1024, 1025, 4096, 10**9, 2**53 + 1, 1e300, 0, -2)
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "uuid",
    "json-pointer",
    "relative-json-pointer",
    "regex",
    "int32",
    "binary",
    "unheard-of",
)
ATOMS = (
    "a",
    "b",
    "[ab]",
    "[^a]",
    "[^\\d]",
    "[\\w-]",
    "[a-c\\]]",
    "[]a]",
    ".",
    "\\d",
    "\\w",
    "\\s",
    "\\D",
    "\\W",
    "\\S",
    '"',
    "\\\\",
    "\\.",
    "\\n",
    "\\u0041",
    "\\x42",
    "\\/",
    "é",
    "(a|b)",
    "(?:a|bc)",
    "(?:)",
    "(?=a)",
    "(?!a)",
    "(?<=a)",
    "(?<!a)",
    "\\b",
    "\\B",
    "^",
    "$",
    "(?i:a)",
    "(?P<n>a)",
    "(a)\\1",
    "\\p{L}",
    "\\cA",
    "[[:alpha:]]",
    "[^\\s]",
    "[^\\W]",
    "[\\S]",
    "[a-]",
    "[^\\n]",
    "\\0",
    "[\\b]",
    "{",
    "a{",
    "\\u{41}",
    "[a&&b]",
    "\\-",
    "\\A",
    "\\z",
    "/",
    "🙂",
)
PLAIN_ATOMS = ATOMS[:26]
QUANTIFIERS = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "{0}", "{,2}", "+?", "*?", "*+", "{2,1}")


SOUND_CONSTANTS = tuple(c for c in CONSTANTS if not isinstance(c, int | float) or abs(c) < 1000)
SOUND_BOUNDS = (0, 1, -1, 3, 5, 7.5, -2.5, 0.1, 0.25, 99, 100, -180, 1000, 123456.789, 1e-6, -0.5, 2**31)
SOUND_MULTIPLES = (1, 2, 3, 7, 10, 0.5, 0.1, 0.01)
SOUND_QUANTIFIERS = ("", "", "", "*", "+", "?", "{2}", "{1,2}", "{1,}", "+?")


class SchemaSource:
    """Draws schemas; the same from the same ``rng``. Two in three are sound, of the kind that people write."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.is_sound = rng.random() < 0.67

    def document(self) -> Any:
        """A whole schema, with definitions that it and they may refer to."""
        schema = self.schema(self._rng.choice((1, 2, 2, 3)))
        if isinstance(schema, dict) and (self.is_sound or self._chance(0.5)):
            schema["$defs"] = {name: self.schema(1) for name in ("a", "b")}
            if self._chance(0.5):
                schema["$defs"]["a"] = self._tree()
        return schema

    def schema(self, depth: int) -> Any:
        """Draw a schema with others in it, at most ``depth`` deep."""
        if self._chance(0.02) or self._rarely(0.04):
            return self._rng.choice((True, {}, {}) if self.is_sound else (True, False))
        kinds = [self._typed] * 12 + [self._constant] * 3 + [self._reference] * 2 + [self._combined] * 4
        schema = self._rng.choice(kinds)(depth)
        if self._rarely(0.1):
            schema = schema | self._rng.choice(kinds)(depth)
        if self._chance(0.1):
            schema |= self._rng.choice(ANNOTATIONS)
        return schema

    def _rarely(self, probability: float) -> bool:
        """Decide whether to draw an odd value."""
        return not self.is_sound and self._chance(probability)

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _some(self, keywords: dict[str, Any], expected: float = 1.2) -> dict[str, Any]:
        """Draw about ``expected`` of ``keywords``, each with a value from its function."""
        return {name: draw() for name, draw in keywords.items() if self._chance(expected / len(keywords))}

    def _typed(self, depth: int) -> dict[str, Any]:
        name = self._rng.choice(TYPES if depth else TYPES[:5])
        schema: dict[str, Any] = {"type": name}
        if self._chance(0.1):
            schema = {"type": self._rng.choice(([name], [name, "null"], ["integer", "string", "object"]))}
        elif self._rarely(0.1):
            schema = {"type": self._rng.choice(([], [name, name], "strin", 7, None))} if self._chance(0.3) else {}
        schema |= {
            "integer": self._number,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }.get(name, lambda depth: {})(depth)
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        ranges = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        bounds, multiples = (SOUND_BOUNDS, SOUND_MULTIPLES) if self.is_sound else (BOUNDS, MULTIPLES)
        drawn = self._some(dict.fromkeys(ranges, lambda: self._rng.choice(bounds)), 1.6)
        if self._chance(0.15):
            drawn["multipleOf"] = self._rng.choice(multiples)
        if self.is_sound or self._chance(0.3):  # a range that is not empty
            low, high = sorted(self._rng.sample(bounds, 2))
            drawn = (
                {}
                if drawn.keys() == {"multipleOf"}
                else {self._rng.choice(ranges[::2]): low, self._rng.choice(ranges[1::2]): high}
            )
        return drawn

    def _string(self, depth: int) -> dict[str, Any]:
        kinds = self._rng.random()
        drawn: dict[str, Any] = {}
        if kinds < 0.35:
            drawn["pattern"] = self._pattern()
        elif kinds < 0.6:
            drawn["format"] = self._rng.choice(FORMATS[:18] if self.is_sound else FORMATS)
        if kinds > 0.6 or self._chance(0.05):
            drawn |= self._counts("minLength", "maxLength")
        return drawn

    def _pattern(self) -> str:
        middle = self._expression(
            self._rng.choice((0, 1, 2, 3)), PLAIN_ATOMS if self.is_sound or self._chance(0.5) else ATOMS
        )
        return self._rng.choice(
            ("^{}$", "^{}$", "{}", "^{}", "{}$", "^({})$") + ("(^{}$)",) * (not self.is_sound)
        ).replace("{}", middle)

    def _expression(self, depth: int, atoms: tuple[str, ...]) -> str:
        if not depth:
            return self._rng.choice(atoms) + self._rng.choice(SOUND_QUANTIFIERS if self.is_sound else QUANTIFIERS)
        inner = [self._expression(depth - 1, atoms) for _ in range(self._rng.choice((1, 2, 2)))]
        if self._chance(0.4):
            return "".join(inner)
        quantifiers = SOUND_QUANTIFIERS if self.is_sound else QUANTIFIERS
        # Of unbounded repetition in itself the judge's ``re`` takes exponential time.
        if any(char in text for text in inner for char in "*+,"):
            quantifiers = ("", "?", "{2}")
        return f"(?:{'|'.join(inner)}){self._rng.choice(quantifiers)}"

    def _count(self) -> Any:
        return self._rng.choice((0, 0, 1, 1, 2, 3, 5) + (2.0, 1.5, -1) * (not self.is_sound))

    def _counts(self, least: str, most: str) -> dict[str, Any]:
        drawn = self._some({least: self._count, most: self._count})
        if self.is_sound and len(drawn) == 2:
            drawn = {least: min(drawn.values()), most: max(drawn.values())}
        return drawn

    def _array(self, depth: int) -> dict[str, Any]:
        def inner() -> Any:
            return self.schema(depth - 1)

        drawn = self._some({"items": inner}, 0.6) | self._counts("minItems", "maxItems")
        if self._chance(0.3):
            drawn["prefixItems"] = [inner() for _ in range(self._rng.choice((1, 1, 2)))]
        if self._rarely(0.25):
            rare = {"contains": inner, "uniqueItems": lambda: self._chance(0.8), "unevaluatedItems": inner}
            rare |= {"minContains": self._count, "maxContains": self._count, "additionalItems": inner}
            drawn |= self._some(rare, 1.5)
        if self._rarely(0.06):
            drawn["items"] = self._rng.choice(([inner()], None, 3))
        return drawn

    def _object(self, depth: int) -> dict[str, Any]:
        def inner() -> Any:
            return self.schema(depth - 1)

        drawn: dict[str, Any] = {}
        names = [name for name in NAMES if self._chance(0.4)]
        if names or self._chance(0.3):
            drawn["properties"] = {name: inner() for name in names}
        if self._chance(0.6):
            drawn["required"] = [name for name in names if self._chance(0.6)]
        if self._rarely(0.15):
            drawn["required"] = [*drawn.get("required", []), self._rng.choice(NAMES)]
        if self._chance(0.35):
            drawn["additionalProperties"] = self._rng.choice((False, True, inner()))
        if self._chance(0.2):
            drawn |= self._counts("minProperties", "maxProperties")
        if self.is_sound and self._chance(0.06):
            drawn["patternProperties"] = {self._pattern(): inner() for _ in range(self._rng.choice((1, 1, 2)))}
        if self._rarely(0.3):
            patterns = {self._pattern(): inner() for _ in range(self._rng.choice((1, 1, 2)))}
            rare = {"patternProperties": lambda: patterns, "propertyNames": inner, "unevaluatedProperties": inner}
            rare |= {"dependentRequired": lambda: {"a": ["b"]}, "dependentSchemas": lambda: {"a": inner()}}
            drawn |= self._some(rare)
        return drawn

    def _constant(self, depth: int) -> dict[str, Any]:
        constants = SOUND_CONSTANTS if self.is_sound else CONSTANTS
        counts = (1, 1, 2, 2, 3) + (0,) * (not self.is_sound)
        values = [self._rng.choice(constants) for _ in range(self._rng.choice(counts))]
        drawn: dict[str, Any] = {"enum": values} if self._chance(0.5) else {"const": self._rng.choice(constants)}
        if self._rarely(0.3):
            drawn["type"] = self._rng.choice(TYPES)
        return drawn

    def _reference(self, depth: int) -> dict[str, Any]:
        places = (
            "#",
            "#/$defs/a",
            "#/$defs/a",
            "#/$defs/b",
            "#/$defs/none",
            "#/properties/a",
            "#/items",
            "#a",
            "x.json",
        )
        places = places[:4] if self.is_sound else places
        return {"$ref": self._rng.choice(places)}

    def _combined(self, depth: int) -> dict[str, Any]:
        def inner() -> Any:
            return self.schema(max(depth - 1, 0))

        keyword = self._rng.choice(
            ("anyOf", "anyOf", "oneOf", "oneOf", "allOf") + ("allOf", "not", "if") * (not self.is_sound)
        )
        if keyword == "not":
            return {"not": inner()}
        if keyword == "if":
            return {"if": inner()} | self._some({"then": inner, "else": inner})
        return {keyword: [inner() for _ in range(self._rng.choice((1, 1, 2, 2, 2, 3) + (0,) * (not self.is_sound)))]}

    def _tree(self) -> dict[str, Any]:
        below = self._rng.choice(({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}))
        within = (
            {"type": "array", "items": below},
            {"type": "object", "properties": {"a": below, "b": {"type": "null"}}, "additionalProperties": False},
            {"anyOf": [below, {"type": "null"}]},
            {"type": "object", "properties": {"a": {"anyOf": [below, {"type": "null"}]}}, "required": ["a"]},
            {"type": "object", "properties": {"a": below}, "required": ["a"]},
            {"type": "array", "items": below, "minItems": 1},
        )
        return self._rng.choice(within)


ANNOTATIONS: tuple[dict[str, Any], ...] = (
    {"title": "A", "description": "of it"},
    {"default": {"not": 1}},
    {"examples": [1], "deprecated": True},
    {"$comment": "none"},
    {"x-guidance": {"lenient": True}},
    {"$id": "https://example.com/a"},
    {"$anchor": "a"},
    {"nullable": True},
    {"unheard-of": {"type": "integer"}},
    {"format": "date"},
    {"readOnly": True, "writeOnly": False, "contentEncoding": "base64"},
)
