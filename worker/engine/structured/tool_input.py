r"""Grammars of inputs of custom tools within structural tags.

A node ``{"type": "tool_input", "tool": …, "syntax": "lark" or "regex", "definition": …, "in_json": …}`` stands for the
input of a tool: raw text, or the text between the quotes of a JSON string. The latter differs in its escapes. They are
written into the literals and classes of the grammar, which xgrammar prints as EBNF.
"""

from __future__ import annotations

import re
from typing import Any

import xgrammar

from ....shared.errors import ValidationError
from .charset import Ranges, class_of, parse_class
from .regex import has_property_in_class, normalize_regex
from .schemas.patterns import spelled_in_json, text_in_json

# A rule's head with its attributes, a literal, a class, or a function.
_PART = re.compile(r'(?m)^\w+(?:\[[^\]]*\])? ::=|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|\w+\((?!\()')
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_CODES = {"a": 7, "b": 8, "e": 27, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "0": 0}


def with_tool_inputs(node: Any, field: str) -> Any:
    """Return a copy of a structural tag's description in which xgrammar's nodes replace those of inputs.

    Raises:
        ValidationError: a grammar is invalid, or xgrammar cannot enforce a part of it. The message names the tool.
    """
    if isinstance(node, list):
        return [with_tool_inputs(item, field) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "tool_input":
        return _input(node, f"{field}: the grammar of {node.get('tool')!r}")
    return {key: with_tool_inputs(value, field) for key, value in node.items()}


def _input(node: dict[str, Any], place: str) -> dict[str, Any]:
    definition, in_json = str(node.get("definition")), bool(node.get("in_json"))
    if node.get("syntax") == "regex":
        pattern = text_in_json(f"^(?:{definition})$", place) if in_json else normalize_regex(definition, place)
        if has_property_in_class(pattern):
            raise ValidationError(f"{place}: \\p within a class is not supported by xgrammar")
        return {"type": "regex", "pattern": pattern}
    try:
        grammar = str(xgrammar.Grammar.from_lark(definition))
    except RuntimeError as error:
        raise ValidationError(f"{place} is refused by xgrammar: {str(error).strip()}") from error
    return {"type": "grammar", "grammar": _in_json(grammar, place) if in_json else grammar}


def _in_json(ebnf: str, place: str) -> str:
    """Return the grammar of the text between the quotes of a JSON string, for a string that ``ebnf`` describes."""

    def spell(part: re.Match[str]) -> str:
        text = part[0]
        if text[0] == '"':
            codes = [ord(char) for char in _ESCAPE.sub(_character, text[1:-1])]
            return f"({' '.join(_spelling([(code, code)], place) for code in codes)})" if codes else text
        if text[0] == "[":
            return _spelling(parse_class(_ESCAPE.sub(_code_point, text)), place)
        if text.endswith("::="):
            return text
        raise ValidationError(
            f"{place}: {text[:-1]} is not supported within JSON, in which this model writes calls; leave out flags of "
            "regular expressions"
        )

    return _PART.sub(spell, ebnf)


def _spelling(ranges: Ranges, place: str) -> str:
    """Return an expression of EBNF for the JSON spelling of a character."""
    plain, codes = spelled_in_json(ranges)
    alternatives = [class_of(plain)] if plain else []
    alternatives += [f'"\\\\" {class_of([(ord(code), ord(code)) for code in codes])}'] if codes else []
    if not alternatives:
        raise ValidationError(f"{place}: xgrammar cannot match {class_of(ranges)} in a JSON string")
    return f"({' | '.join(alternatives)})"


def _code_point(escape: re.Match[str]) -> str:
    """Return an escape that xgrammar printed as one that ``parse_class`` reads."""
    char = _character(escape)
    return char if ord(char) > 0xFFFF else f"\\u{ord(char):04x}"


def _character(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return chr(_CODES.get(code, ord(code)))
