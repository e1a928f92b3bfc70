"""Custom tools, whose input is plain text. The model sees a function with one argument, the text ``input``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....shared.errors import ValidationError
from ....shared.params.structured import StructuredOutputsParams
from ....shared.values.shown import shown

INPUT = "input"
_SYNTAXES = ("lark", "regex")
_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


class InputGrammar(NamedTuple):
    """Grammar of the input of the custom tool ``tool``. ``syntax`` is "lark" or "regex"."""

    tool: str
    syntax: str
    definition: str

    @property
    def of_answer(self) -> StructuredOutputsParams:
        """The grammar of an answer that is the input."""
        if self.syntax == "regex":
            return StructuredOutputsParams(regex=self.definition)
        return StructuredOutputsParams(grammar=self.definition)

    def node(self, *, in_json: bool) -> dict[str, Any]:
        """Return the node of a structural tag, which only our engine has; see ``worker/engine/structured``.

        Args:
            in_json: whether the input stands between the quotes of a JSON string.
        """
        return {"type": "tool_input", **self._asdict(), "in_json": in_json}


def read_input_grammar(tool: str, form: object, field: str) -> InputGrammar | None:
    """Return the grammar in the ``format`` of a custom tool; None for any text. The engine checks the definition.

    Raises:
        ValidationError: a part is invalid; names the field.
    """
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        raise ValidationError(f"{field}.type must be 'text' or 'grammar', got {shown(form)}")
    # Chat completions have the two fields in an object of its own; so had older requests for responses.
    inner = form.get("grammar")
    fields = inner if isinstance(inner, Mapping) else form
    syntax, definition = fields.get("syntax"), fields.get("definition")
    if syntax not in _SYNTAXES:
        raise ValidationError(f"{field}.syntax must be 'lark' or 'regex', got {shown(syntax)}")
    if not isinstance(definition, str) or not definition:
        raise ValidationError(f"{field}.definition must be given, as a string, got {shown(definition)}")
    return InputGrammar(tool, syntax, definition)


def custom_function(tool: Mapping[str, Any], grammar: InputGrammar | None) -> dict[str, Any]:
    """Return the function that a custom tool is shown as."""
    description = tool.get("description")
    lines = ["The argument `input` is the whole input of the tool, as plain text."]
    if isinstance(description, str) and description:
        lines.insert(0, description)
    if grammar is not None:
        lines.append(f"The input must match this grammar ({grammar.syntax}):\n{grammar.definition}")
    return {"name": tool.get("name"), "description": "\n\n".join(lines), "parameters": _PARAMETERS}


def called(name: str, text: str) -> dict[str, str]:
    """Return a call of the custom tool ``name`` as one of the function that it is shown as."""
    return {"name": name, "arguments": json.dumps({INPUT: text}, ensure_ascii=False)}
