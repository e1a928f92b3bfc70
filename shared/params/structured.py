"""``structured_outputs`` and checks of its shape and size. The engine checks whether a grammar is valid."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import ValidationError
from ..values.arguments import CheckedNames
from ..values.checks import check_encodable, check_text
from ..values.shown import shown

GRAMMAR_FIELDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Max size of a grammar's source; a schema of a thousand fields has about 100 kB.
MAX_GRAMMAR_BYTES = 1 << 18
MAX_GRAMMAR_NESTING = 64
MAX_CHOICES = 10_000


class GrammarFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``StructuredOutputsParams``, which explains them, and of ``structured_outputs`` in a body."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool | None = None


class StructuredOutputsParams(
    GrammarFields, metaclass=CheckedNames, array_like=True, omit_defaults=True, frozen=True, kw_only=True, gc=False
):
    """Constrain the output to a grammar: exactly one of the first six is set.

    Args:
        json: a JSON schema, as a dict or as JSON. Properties come in the schema's order. With xgrammar an object has no
            properties but those listed, unless ``additionalProperties`` says so.
        regex: the whole output matches it; "\\d", "\\w" and "\\s" are those of ASCII.
        choice: the output is one of these strings.
        grammar: EBNF as llama.cpp writes it, from the rule ``root``; or Lark, from ``start``.
        json_object: True for any JSON object.
        structural_tag: JSON: free text, in which each trigger starts a tag whose inside follows a JSON schema.
        disable_any_whitespace: JSON has the whitespace of ``json.dumps`` (xgrammar) or none (llguidance).
        disable_additional_properties: an object of the schema that does not say has no properties but those listed.
        whitespace_pattern: a regular expression for the whitespace in JSON; llguidance only.
        enable_in_reasoning: True holds from the first token on. False holds from the end of the model's thinking on, if
            it begins with that; the model must have tokens for both ends. None is False for chat messages to a model
            that thinks, for prompts that end within thinking, and with a ``thinking_token_budget``; else True.

    Raises:
        ValidationError: not exactly one is set, or one has the wrong type or size.
    """

    def __post_init__(self) -> None:
        check_structured_outputs(self)


def check_structured_outputs(params: GrammarFields) -> None:
    """Require exactly one grammar, of a valid type and size.

    Raises:
        ValidationError: the message has the field, its value, and the allowed values.
    """
    set_fields = [name for name in GRAMMAR_FIELDS if getattr(params, name) is not None]
    if len(set_fields) != 1:
        raise ValidationError(
            f"structured_outputs must have exactly one of {', '.join(GRAMMAR_FIELDS)}, "
            f"got {', '.join(set_fields) or 'none'}"
        )
    field, value = f"structured_outputs.{set_fields[0]}", getattr(params, set_fields[0])
    for flag in ("disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(getattr(params, flag), bool):
            raise ValidationError(
                f"structured_outputs.{flag} must be True or False, got {shown(getattr(params, flag))}"
            )
    if not isinstance(params.enable_in_reasoning, bool | None):
        raise ValidationError(
            "structured_outputs.enable_in_reasoning must be True, False or None, got "
            f"{shown(params.enable_in_reasoning)}"
        )
    if params.whitespace_pattern is not None:
        _check_text("structured_outputs.whitespace_pattern", params.whitespace_pattern)
    if set_fields[0] == "json_object":
        if value is not True:
            raise ValidationError(f"{field} must be True, got {shown(value)}; leave it at None otherwise")
    elif set_fields[0] == "choice":
        _check_choice(field, value)
    elif set_fields[0] == "json" and isinstance(value, dict):
        _check_schema(field, value)
    else:
        _check_text(field, value)
        if set_fields[0] in ("json", "structural_tag"):
            _parse_object(field, value)


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValidationError(f"{field} must be a non-empty string, got {shown(value)}")
    if "\x00" in value:
        raise ValidationError(f"{field} must not hold a NUL character")
    num_bytes = len(check_text(field, value).encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ValidationError(f"{field} must have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}")


def _check_choice(field: str, choices: Any) -> None:
    if not isinstance(choices, list) or not choices:
        raise ValidationError(f"{field} must be a list of non-empty strings with at least one, got {shown(choices)}")
    if len(choices) > MAX_CHOICES:
        raise ValidationError(f"{field} must have at most {MAX_CHOICES} strings, got {len(choices)}")
    for choice in choices:
        _check_text(field, choice)
    num_chars = sum(map(len, choices))
    if num_chars > MAX_GRAMMAR_BYTES:
        raise ValidationError(f"{field} must have at most {MAX_GRAMMAR_BYTES} characters in all, got {num_chars}")


def _check_schema(field: str, schema: dict[str, Any]) -> None:
    check_nesting(field, schema)
    check_encodable(field, schema)
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"{field} must hold what JSON can say: {error}") from error
    _check_text(field, text)


def _parse_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValidationError(f"{field} must be nested at most {MAX_GRAMMAR_NESTING} deep") from error
    except ValueError as error:
        raise ValidationError(f"{field} must be JSON: {error}") from error
    check_nesting(field, value)
    if not isinstance(value, dict):
        raise ValidationError(f"{field} must be a JSON object, got {shown(text)}")
    check_text(field, json.dumps(value, ensure_ascii=False))  # escapes may spell a surrogate
    return value


def check_nesting(field: str, value: Any) -> None:
    """Refuse deep nesting, because nothing may compile, or recurse into, unlimited nesting.

    Raises:
        ValidationError: deeper than ``MAX_GRAMMAR_NESTING``.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_GRAMMAR_NESTING:
            raise ValidationError(f"{field} must be nested at most {MAX_GRAMMAR_NESTING} deep")
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
