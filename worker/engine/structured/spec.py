"""Converts a request's ``structured_outputs`` to a hashable specification that a backend compiles."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from ....shared.params.structured import StructuredOutputsParams
from .regex import normalize_regex

# Most characters of whitespace between two parts of JSON, because some models write newlines until max_tokens. It is
# enough for seven levels of four spaces.
MAX_WHITESPACE = 32


class GrammarKind(enum.Enum):
    """The kinds of ``GrammarSpec.text``."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar to compile. Equal specifications are compiled once.

    Args:
        text: a JSON schema, a regular expression, a JSON list of strings, EBNF or Lark, or a structural tag as JSON.
        any_whitespace: whether JSON may have whitespace wherever JSON allows it.
        whitespace_pattern: a regular expression for this whitespace; None for no restriction.
        has_any_length: whether numbers and whitespace in JSON may have any length, as in outputs that an older engine
            began.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    has_any_length: bool = False

    @property
    def field(self) -> str:
        """Name of the request's parameter, for messages."""
        return f"structured_outputs.{self.kind.value}"

    @property
    def limits_lengths(self) -> bool:
        """Whether the output is JSON whose numbers and whitespace have a limited length."""
        return self.kind in (GrammarKind.JSON, GrammarKind.STRUCTURAL_TAG) and not self.has_any_length


def spec_of(params: StructuredOutputsParams) -> GrammarSpec:
    """Return the specification of valid ``params``.

    Raises:
        ValidationError: a regular expression has a part that no backend matches as Python does.
    """
    if params.regex is not None:
        return GrammarSpec(GrammarKind.REGEX, normalize_regex(params.regex, "structured_outputs.regex"))
    if params.choice is not None:
        return GrammarSpec(GrammarKind.CHOICE, json.dumps(params.choice))
    if params.grammar is not None:
        return GrammarSpec(GrammarKind.GRAMMAR, params.grammar)
    if params.structural_tag is not None:
        return GrammarSpec(GrammarKind.STRUCTURAL_TAG, params.structural_tag)
    if params.json is None:
        schema: Any = {"type": "object"}
    else:
        schema = json.loads(params.json) if isinstance(params.json, str) else params.json
    if params.disable_additional_properties:
        schema = _forbid_additional_properties(schema)
    # Keys are not sorted, because the output has them in this order.
    return GrammarSpec(
        GrammarKind.JSON,
        json.dumps(schema),
        any_whitespace=not params.disable_any_whitespace,
        whitespace_pattern=params.whitespace_pattern,
    )


def _forbid_additional_properties(schema: Any) -> Any:
    """Return ``schema`` with ``additionalProperties: false`` in every object that lists properties and lacks it."""
    if isinstance(schema, list):
        return [_forbid_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _forbid_additional_properties(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    return result
