"""Grammars that enforce tool calls, in the model's own format where the engine can enforce it, else as JSON."""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any

from ....shared.params.answer_formats import (
    Arguments,
    Calls,
    ElementArguments,
    FramedCalls,
    JsonArguments,
    ObjectCalls,
    TreeArguments,
)
from ....shared.params.structured import StructuredOutputsParams
from ..json_schema import embeddable
from .custom import INPUT
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


class NativeCalls(abc.ABC):
    """Grammars of calls in a format of a family of models, as structural tags; xgrammar only.

    Attributes:
        section: literals around all calls; None if each call has its own.
        begin: the first line of a call that has no section.
        separator: literal between two calls.
        is_legacy: whether ``optional`` has the form that llguidance takes, too, if no custom tool has a grammar.
        arguments: form of the arguments.
    """

    section: tuple[str, str] | None
    begin: str
    separator: str
    is_legacy: bool = False
    arguments: Arguments = JsonArguments()

    def __init__(self, functions: Sequence[Function], *, is_parallel: bool) -> None:
        self._functions = functions
        self._is_parallel = is_parallel

    @abc.abstractmethod
    def tag(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """Return the structure of a call of the function ``name``, whose arguments follow ``content``."""

    def forced(self, choice: ToolChoice) -> StructuredOutputsParams:
        """Return the grammar of one or more calls, of the chosen function if ``choice`` names one."""
        chosen = [function for function in self._functions if choice.name in (None, function.name)]
        return _structural(self._sequence(chosen))

    def optional(self) -> StructuredOutputsParams | None:
        """Return the grammar that applies to the calls in otherwise free output; None if it would enforce nothing.

        The model writes free text. Once it starts a call, name and arguments must match the definitions; a function
        that is not strict takes any object.
        """
        has_grammars = any(function.grammar is not None for function in self._functions)
        if not has_grammars and not any(function.strict for function in self._functions):
            return None
        tags = self._tags(self._functions, is_strict=False)
        trigger = self.begin
        if self.section is not None:
            trigger, end = self.section
            tags = [{"type": "tag", "begin": trigger, "content": self._list(tags), "end": end}]
        if has_grammars or not self.is_legacy:
            return _structural({"type": "triggered_tags", "triggers": [trigger], "tags": tags})
        structures = [
            {"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": tag["end"]} for tag in tags
        ]
        legacy = {"structures": structures, "triggers": [trigger]}
        return StructuredOutputsParams(structural_tag=json.dumps(legacy))

    def or_answer(self, answer: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the grammar of either ``answer``, which is JSON, or one or more calls."""
        schema = {"type": "object"} if answer.json is None else answer.json
        return _structural({"type": "or", "elements": [_json_grammar(schema), self._sequence(self._functions)]})

    def _sequence(self, functions: Sequence[Function]) -> dict[str, Any]:
        calls = self._list(self._tags(functions, is_strict=True))
        if self.section is None:
            return calls
        begin, end = map(_literal, self.section)
        return {"type": "sequence", "elements": [begin, calls, *([end] if end["value"] else [])]}

    def _tags(self, functions: Sequence[Function], *, is_strict: bool) -> list[dict[str, Any]]:
        return [self.tag(function.name, self._content(function, is_strict=is_strict)) for function in functions]

    def _content(self, function: Function, *, is_strict: bool) -> dict[str, Any]:
        """Return the grammar of the arguments of ``function``."""
        if function.grammar is None:
            if is_strict or function.strict:
                return _json_grammar(function.parameters, self.arguments.style)
            if isinstance(self.arguments, TreeArguments):
                return {"type": "any_text"}  # xgrammar takes no unknown names of elements
            return _json_grammar({"type": "object"}, self.arguments.style)
        begin, end = _around_input(self.arguments)
        node = function.grammar.node(in_json=isinstance(self.arguments, JsonArguments))
        return {"type": "sequence", "elements": [_literal(begin), node, _literal(end)]}

    def _list(self, tags: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not self._is_parallel,
        }


class _FramedCalls(NativeCalls):
    """Calls as a name and arguments between literals."""

    def __init__(self, calls: FramedCalls, functions: Sequence[Function], *, is_parallel: bool) -> None:
        super().__init__(functions, is_parallel=is_parallel)
        self._calls = calls
        self.section = calls.sections[0] if calls.sections else None
        self.begin = calls.call.splitlines()[0]
        self.separator = calls.separator
        self.arguments = calls.arguments

    def tag(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls
        begin = f"{calls.call}{calls.name_prefix}{name}"
        if calls.counter is None:
            begin += calls.name_end
        else:
            begin += calls.counter[0]
            number = {"type": "regex", "pattern": _COUNTER}
            name_end = _literal(calls.counter[1] + calls.name_end)
            content = {"type": "sequence", "elements": [number, name_end, content]}
        return {"type": "tag", "begin": begin, "content": content, "end": calls.call_end}


class _ObjectCalls(NativeCalls):
    """Calls as JSON objects: in a list between literals, each between literals, or without any."""

    def __init__(self, calls: ObjectCalls, functions: Sequence[Function], *, is_parallel: bool) -> None:
        super().__init__(functions, is_parallel=is_parallel)
        self._calls = calls
        self.is_legacy = not calls.is_list
        self.section = (f"{calls.opens[0]}[", f"]{calls.close}") if calls.is_list else None
        self.separator = ", " if calls.is_list else calls.separator or "\n"
        has_frames = not calls.is_list and not calls.bare
        self._open, self._close = (calls.opens[0], calls.close) if has_frames else ("", "")
        self.begin = self._open.strip() if has_frames else '{"name": '

    def tag(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        calls = self._calls
        begin = f"{{{json.dumps(name)}: "
        if calls.names:
            begin = f'{{"{calls.names[0]}": {json.dumps(name)}, "{calls.arguments[0]}": '
        return {
            "type": "tag",
            "begin": self._open + begin,
            "content": content,
            "end": f"}}{self._close}",
        }


def native_calls(calls: Calls, functions: Sequence[Function], *, is_parallel: bool) -> NativeCalls | None:
    """Return the grammars of calls in the format ``calls``; None if none can enforce it."""
    if isinstance(calls, FramedCalls) and calls.arguments.style:
        return _FramedCalls(calls, functions, is_parallel=is_parallel)
    if isinstance(calls, ObjectCalls):
        return _ObjectCalls(calls, functions, is_parallel=is_parallel)
    return None


def _around_input(arguments: Arguments) -> tuple[str, str]:
    """Return the literals around the input of a custom tool."""
    match arguments:
        case ElementArguments(key=key, value=value, kind=kind):
            line_break = "\n" if arguments.has_line_breaks else ""
            attribute = "" if kind is None else f"{kind[0]}{arguments.string_kind}{kind[1]}"
            return f"{key[0]}{INPUT}{key[1]}{attribute}{value[0]}{line_break}", f"{line_break}{value[1]}"
        case TreeArguments(prefix=prefix):
            return f"{prefix}<{INPUT}>", f"{prefix}</{INPUT}>"
        case _:
            return f'{{"{INPUT}": "', '"}'


def _literal(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


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
