"""What holds an output to tool calls: structured outputs, so that every model can do it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....shared.params import StructuredOutputsParams
from ..json_schema import under_definition
from .definitions import Function, ToolChoice
from .formats import HERMES_BEGIN, HERMES_END


def forced_calls(functions: Sequence[Function], choice: ToolChoice, *, is_parallel: bool) -> StructuredOutputsParams:
    """Return what makes the output the arguments of the function that is named, or a list of calls.

    An element of the list has the keys ``name`` and ``parameters``, as ``formats.LIST_OF_CALLS`` reads it.
    """
    if choice.name is not None:
        schema = next(function.parameters for function in functions if function.name == choice.name)
    else:
        schema = _list_of_calls(functions, is_parallel=is_parallel)
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


def strict_hermes_calls(functions: Sequence[Function]) -> StructuredOutputsParams | None:
    """Return what holds the calls in an otherwise free output to their schemas; None if no function is strict.

    The model writes what it likes; once it begins a call, name and arguments follow the definitions, those of functions
    that are not strict as any object.
    """
    if not any(function.strict for function in functions):
        return None
    structures = [
        {
            "begin": f'{HERMES_BEGIN}\n{{"name": {json.dumps(function.name)}, "arguments": ',
            "schema": function.parameters if function.strict else {"type": "object"},
            "end": f"}}\n{HERMES_END}",
        }
        for function in functions
    ]
    return StructuredOutputsParams(structural_tag=json.dumps({"structures": structures, "triggers": [HERMES_BEGIN]}))


def _list_of_calls(functions: Sequence[Function], *, is_parallel: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for function in functions:
        parameters, needed = under_definition(function.parameters, function.name)
        definitions |= needed
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
