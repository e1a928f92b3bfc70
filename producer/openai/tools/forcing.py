"""Grammars that enforce tool calls. They are structured outputs, so they work with every model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....shared.params.structured import StructuredOutputsParams
from ..json_schema import embeddable
from .definitions import Function, ToolChoice

HERMES_BEGIN = "<tool_call>"
_HERMES_END = "}\n</tool_call>"


def forced_calls(functions: Sequence[Function], choice: ToolChoice, *, is_parallel: bool) -> StructuredOutputsParams:
    """Return the grammar of a forced call: the arguments of the chosen function, or a list of calls.

    An element of the list has the keys ``name`` and ``parameters``, as ``formats.LIST_OF_CALLS`` expects.
    """
    if choice.name is not None:
        schema = next(function.parameters for function in functions if function.name == choice.name)
    else:
        schema = _list_of_calls(functions, is_parallel=is_parallel)
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def strict_hermes_calls(functions: Sequence[Function]) -> StructuredOutputsParams | None:
    """Return the grammar that applies to the calls in otherwise free output; None if no function is strict.

    The model writes free text. Once it starts a call, name and arguments must match the definitions; a function that is
    not strict takes any object.
    """
    if not any(function.strict for function in functions):
        return None
    structures = [
        {
            "begin": _hermes_begin(function),
            "schema": function.parameters if function.strict else {"type": "object"},
            "end": _HERMES_END,
        }
        for function in functions
    ]
    return StructuredOutputsParams(structural_tag=json.dumps({"structures": structures, "triggers": [HERMES_BEGIN]}))


def answer_or_hermes_calls(
    answer: StructuredOutputsParams, functions: Sequence[Function], *, is_parallel: bool
) -> StructuredOutputsParams:
    """Return the grammar of either ``answer``, which is JSON, or one or more calls; xgrammar only."""
    schema = {"type": "object"} if answer.json is None else answer.json
    calls = {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": _hermes_begin(function),
                "content": _json_grammar(function.parameters),
                "end": _HERMES_END,
            }
            for function in functions
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    either = {"type": "or", "elements": [_json_grammar(schema), calls]}
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": either}))


def _json_grammar(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _hermes_begin(function: Function) -> str:
    return f'{HERMES_BEGIN}\n{{"name": {json.dumps(function.name)}, "arguments": '


def _list_of_calls(functions: Sequence[Function], *, is_parallel: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for function in functions:
        parameters, required_definitions = embeddable(function.parameters, function.name)
        definitions |= required_definitions
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if not is_parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema
