"""Grammars that enforce tool calls, in the model's own format where the engine can enforce it, else as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ....shared.params.answer_formats import Calls, FramedCalls, ObjectCalls
from ....shared.params.structured import StructuredOutputsParams
from ..json_schema import embeddable
from .definitions import Function, ToolChoice

# Longest number that a model may write into a call whose format numbers its calls.
_COUNTER = r"\d{1,3}"


def forced_json(functions: Sequence[Function], choice: ToolChoice, *, is_parallel: bool) -> StructuredOutputsParams:
    """Return the grammar of a forced call as JSON, which works with every model and engine: the arguments of the chosen
    function, or a list of calls.

    An element of the list has the keys ``name`` and ``parameters``, as ``formats.LIST_OF_CALLS`` expects.
    """
    if choice.name is not None:
        schema = next(function.parameters for function in functions if function.name == choice.name)
    else:
        schema = _list_of_calls(functions, is_parallel=is_parallel)
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)


class NativeCalls:
    """Grammars of calls in a format of its own, as structural tags; xgrammar only.

    Args:
        calls: a format for which ``is_supported``.
    """

    def __init__(self, calls: Calls, functions: Sequence[Function], *, is_parallel: bool) -> None:
        self._calls = calls
        self._functions = functions
        self._is_parallel = is_parallel

    @staticmethod
    def is_supported(calls: Calls) -> bool:
        """Whether a grammar can enforce this format."""
        if isinstance(calls, FramedCalls):
            return bool(calls.arguments.style)
        return isinstance(calls, ObjectCalls) and (bool(calls.opens) or not calls.is_list)

    def forced(self, choice: ToolChoice) -> StructuredOutputsParams:
        """Return the grammar of one or more calls, of the chosen function if ``choice`` names one."""
        chosen = [function for function in self._functions if choice.name in (None, function.name)]
        return _structural(self._sequence(chosen))

    @property
    def is_legacy(self) -> bool:
        """Whether ``optional`` has the form that llguidance takes, too."""
        return isinstance(self._calls, ObjectCalls) and not self._calls.is_list

    def optional(self) -> StructuredOutputsParams | None:
        """Return the grammar that applies to the calls in otherwise free output; None if no function is strict.

        The model writes free text. Once it starts a call, name and arguments must match the definitions; a function
        that is not strict takes any object.
        """
        if not any(function.strict for function in self._functions):
            return None
        section = self._section()
        if section is not None:
            calls = self._list(self._functions, is_strict=False)
            tag = {"type": "tag", "begin": section[0], "content": calls, "end": section[1]}
            return _structural({"type": "triggered_tags", "triggers": [section[0]], "tags": [tag]})
        tags = self._tags(self._functions, is_strict=False)
        if not self.is_legacy:
            return _structural({"type": "triggered_tags", "triggers": [self._begin], "tags": tags})
        structures = [
            {"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": tag["end"]} for tag in tags
        ]
        legacy = {"structures": structures, "triggers": [self._begin]}
        return StructuredOutputsParams(structural_tag=json.dumps(legacy))

    def or_answer(self, answer: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the grammar of either ``answer``, which is JSON, or one or more calls."""
        schema = {"type": "object"} if answer.json is None else answer.json
        return _structural({"type": "or", "elements": [_json_grammar(schema), self._sequence(self._functions)]})

    def _sequence(self, functions: Sequence[Function]) -> dict[str, Any]:
        calls = self._list(functions, is_strict=True)
        section = self._section()
        if section is None:
            return calls
        ends = [{"type": "const_string", "value": value} for value in section if value]
        return {"type": "sequence", "elements": [ends[0], calls, *ends[1:]]}

    def _list(self, functions: Sequence[Function], *, is_strict: bool) -> dict[str, Any]:
        if isinstance(self._calls, ObjectCalls):
            separator = ", " if self._calls.is_list else self._calls.separator or "\n"
        else:
            assert isinstance(self._calls, FramedCalls)
            separator = self._calls.separator
        return {
            "type": "tags_with_separator",
            "tags": self._tags(functions, is_strict=is_strict),
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": not self._is_parallel,
        }

    @property
    def _begin(self) -> str:
        """The first line of a call that has no section."""
        if isinstance(self._calls, FramedCalls):
            return self._calls.call.splitlines()[0]
        assert isinstance(self._calls, ObjectCalls)
        return f'{{"{self._calls.names[0]}": ' if self._calls.bare else self._calls.opens[0].strip()

    def _section(self) -> tuple[str, str] | None:
        """Return the literals around all calls; None if each call has its own."""
        if isinstance(self._calls, FramedCalls):
            return self._calls.sections[0] if self._calls.sections else None
        assert isinstance(self._calls, ObjectCalls)
        return (f"{self._calls.opens[0]}[", f"]{self._calls.close}") if self._calls.is_list else None

    def _tags(self, functions: Sequence[Function], *, is_strict: bool) -> list[dict[str, Any]]:
        tag = self._framed_tag if isinstance(self._calls, FramedCalls) else self._object_tag
        return [
            tag(function.name, function.parameters if is_strict or function.strict else {"type": "object"})
            for function in functions
        ]

    def _framed_tag(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls
        assert isinstance(calls, FramedCalls)
        begin, content = f"{calls.call}{calls.name_prefix}{name}", _json_grammar(schema, calls.arguments.style)
        if calls.counter is None:
            begin += calls.name_end
        else:
            begin += calls.counter[0]
            number = {"type": "regex", "pattern": _COUNTER}
            name_end = {"type": "const_string", "value": calls.counter[1] + calls.name_end}
            content = {"type": "sequence", "elements": [number, name_end, content]}
        return {"type": "tag", "begin": begin, "content": content, "end": calls.call_end}

    def _object_tag(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls
        assert isinstance(calls, ObjectCalls)
        begin = f"{{{json.dumps(name)}: "
        if calls.names:
            begin = f'{{"{calls.names[0]}": {json.dumps(name)}, "{calls.arguments[0]}": '
        open_each = calls.opens[0] if calls.opens and not calls.is_list and not calls.bare else ""
        end = "" if calls.is_list or calls.bare else calls.close
        return {"type": "tag", "begin": open_each + begin, "content": _json_grammar(schema), "end": f"}}{end}"}


def _structural(grammar: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": grammar}))


def _json_grammar(schema: Any, style: str = "json") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": 1}


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
