"""Combine tools, response format and reasoning of a chat body: the grammar for the engine, and the parser of its
answer.

A parser is fed the text as it arrives, and returns the parts of the message that are certain. The same text in other
pieces must give the same parts in total, because a resumed stream arrives in other pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ....shared.errors import ValidationError
from ....shared.params.answer_formats import CHANNELS, ReasoningFormat
from ....shared.params.chat import NONE
from ....shared.params.structured import StructuredOutputsParams
from ....shared.process.boundary import Boundary
from ....shared.values.shown import shown
from ..json_schema import SCHEMA_FIELD, structured_outputs_of
from ..parsers import Parsers
from ..reasoning import MarkRemover, ReasoningSplitter, find_reasoning_format, is_thinking_off
from ..tools.call_reader import Content, Piece
from ..tools.definitions import Function, ToolChoice, allowed_functions, read_tool_choice, read_tools
from ..tools.forcing import NativeCalls, forced_json, native_calls
from ..tools.formats import LIST_OF_CALLS, CallFormat, find_tool_call_style, named_call
from ..tools.parser import InputParser, ToolCallParser
from .channels import ChannelParser
from .common import OpenAIFinishReason
from .parts import CallDelta, MessageParts

ANSWER_PARSER_FAILED = "answer_parser_failed"


class AnswerParser(Protocol):
    """Parser of one answer, from its first character on."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        """Set whether the text starts inside the reasoning, before it is fed; None if unknown."""
        ...

    def feed(self, text: str) -> MessageParts:
        """Return the parts that ``text`` makes certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        """End the text and return the parts still held back; ``is_cut`` if a limit ended it."""
        ...

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        """Return the finish reason, after ``finish``: "tool_calls" instead of "stop" if the answer calls tools."""
        ...


class PlainText:
    """Parser that returns all text as content."""

    def begin(self, *, in_reasoning: bool | None) -> None:
        pass

    def feed(self, text: str) -> MessageParts:
        return MessageParts(text)

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        return MessageParts()

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return reason


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True):
    """The required form of an answer, and how to parse it.

    Args:
        functions: for the chat template; empty with ``tool_choice`` "none".
        custom_tools: names of those whose calls have an input instead of arguments.
        grammar: grammar of the output; None for free text.
        grammar_fields: the body's names of the engine's grammar fields.
        call_format: None if the answer has no calls, or has them in channels, or is the input of one.
        input_of: the custom tool whose input the answer is; empty for other answers.
        has_channels: whether the answer is in OpenAI's harmony format.
        is_single: whether only the first call is returned.
        reasoning: None if no reasoning is split off.
        may_begin_inside: whether text without a start mark may be reasoning that the prompt started.
        is_inside: whether the prompt started the reasoning, if the worker does not report it.
        includes_reasoning: whether reasoning is returned to the caller.
    """

    functions: list[Function]
    custom_tools: frozenset[str] = frozenset()
    grammar: StructuredOutputsParams | None
    grammar_fields: dict[str, str]
    call_format: CallFormat | None
    input_of: str = ""
    has_channels: bool
    is_single: bool
    reasoning: ReasoningFormat | None
    may_begin_inside: bool
    is_inside: bool
    includes_reasoning: bool

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments for the chat template."""
        return {"tools": [function.for_template for function in self.functions]} if self.functions else {}

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must include special tokens, since a marker may be one."""
        is_marked = self.call_format is not None and bool(self.call_format.markers)
        return is_marked or self.has_channels or self.reasoning is not None

    def make_parser(self, *, whole: bool = False) -> AnswerParser:
        """Return a parser of one answer; ``whole`` if its text arrives in one piece."""
        if self.has_channels:
            names = [function.name for function in self.functions]
            return ChannelParser(
                names, whole=whole, is_single=self.is_single, includes_reasoning=self.includes_reasoning
            )
        if self.call_format is None and not self.input_of and self.reasoning is None:
            return PlainText()
        return FormParser(self, whole=whole)


class FormParser:
    """Splits text into reasoning, content and tool calls; see ``AnswerParser``."""

    def __init__(self, form: AnswerForm, *, whole: bool) -> None:
        self._form = form
        self._calls: ToolCallParser | InputParser | None = None
        if form.input_of:
            self._calls = InputParser(form.input_of)
        elif form.call_format is not None:
            schemas = {function.name: function.parameters for function in form.functions}
            self._calls = ToolCallParser(form.call_format, schemas, whole=whole)
        self._splitter: ReasoningSplitter | None = None
        self._remover: MarkRemover | None = None
        if form.reasoning is not None and form.reasoning.answer_marks:
            self._remover = MarkRemover(form.reasoning.answer_marks)
        if form.reasoning is not None:
            self._splitter = ReasoningSplitter(form.reasoning, is_inside=form.is_inside)
        self._has_calls = False

    def begin(self, *, in_reasoning: bool | None) -> None:
        if self._splitter is not None and in_reasoning is not None:
            self._splitter.is_inside = in_reasoning and self._form.may_begin_inside

    def feed(self, text: str) -> MessageParts:
        reasoning = ""
        with _parsing():
            if self._splitter is not None:
                reasoning, text = self._splitter.feed(text)
            return self._message_parts(reasoning, self._pieces(text))

    def finish(self, *, is_cut: bool = False) -> MessageParts:
        reasoning, text = "", ""
        with _parsing():
            if self._splitter is not None:
                reasoning, text = self._splitter.finish()
            pieces = self._pieces(text, is_end=True)
            if self._calls is not None:
                pieces += self._calls.finish(is_cut=is_cut)
            return self._message_parts(reasoning, pieces)

    def finish_reason(self, reason: OpenAIFinishReason) -> OpenAIFinishReason:
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _pieces(self, text: str, *, is_end: bool = False) -> list[Piece]:
        if self._remover is not None:
            text = self._remover.feed(text) + (self._remover.finish() if is_end else "")
        if self._calls is None:
            return [Content(text)] if text else []
        return self._calls.feed(text)

    def _message_parts(self, reasoning: str, pieces: list[Piece]) -> MessageParts:
        content = ""
        calls: dict[int, CallDelta] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
            elif piece.index == 0 or not self._form.is_single:
                call = calls.setdefault(piece.index, CallDelta(index=piece.index, function={"arguments": ""}))
                if piece.name is not None:
                    call["function"]["name"] = piece.name
                if piece.call_id is not None:
                    call["id"] = piece.call_id
                call["function"]["arguments"] += piece.arguments
        self._has_calls = self._has_calls or bool(calls)
        return MessageParts(content, reasoning if self._form.includes_reasoning else "", list(calls.values()))


def _parsing() -> Boundary:
    return Boundary("parser of reasoning and tool calls", ANSWER_PARSER_FAILED)


class FormFields(Protocol):
    """The fields of a chat body that determine the form of its answer; see ``chat.ChatCompletionBody``."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: dict[str, Any] | None
    include_reasoning: bool | None


def answer_form(
    fields: FormFields,
    parsers: Parsers,
    *,
    grammar: StructuredOutputsParams | None,
    template_kwargs: Mapping[str, Any],
) -> AnswerForm:
    """Return the form of an answer.

    Args:
        grammar: the body's ``structured_outputs``.
        template_kwargs: the body's arguments for the chat template, which may turn thinking off.

    Raises:
        ValidationError: a field is invalid, or two exclude each other; names them.
    """
    functions, tool_choice = allowed_functions(fields.tool_choice, read_tools(fields.tools))
    choice = read_tool_choice(tool_choice, functions)
    format_grammar = structured_outputs_of(fields.response_format)
    if grammar is not None and format_grammar is not None:
        raise ValidationError("response_format and structured_outputs exclude each other; pass one of them")
    if grammar is not None and choice.is_forced:
        raise ValidationError("structured_outputs cannot be combined with a forced tool call; pass tool_choice='auto'")
    is_parallel = fields.parallel_tool_calls is not False
    calls = _CallForm(functions, choice, parsers, is_parallel=is_parallel)
    call_grammar = calls.grammar
    if format_grammar is not None and choice.mode == "auto":
        call_grammar, format_grammar = None, calls.or_answer(format_grammar)
    output_grammar = grammar or _for_engine(call_grammar or format_grammar, parsers)
    if output_grammar is not None and parsers.thinks_before_grammar and parsers.reasoning == NONE:
        # No parser would remove the thinking from the answer.
        output_grammar = msgspec.structs.replace(output_grammar, enable_in_reasoning=True)
    is_json = choice.is_forced or format_grammar is not None
    thinks_first = (
        parsers.thinks_before_grammar and output_grammar is not None and not output_grammar.enable_in_reasoning
    )
    reasoning = None if parsers.reasoning == NONE else find_reasoning_format(parsers.reasoning)
    if is_json and not thinks_first:
        reasoning = None
    # If a grammar applies from the first token on, text without a start mark is the answer.
    may_begin_inside = grammar is None or thinks_first
    is_inside = may_begin_inside and template_kwargs.get("add_generation_prompt") is not False
    is_inside = is_inside and not is_thinking_off(template_kwargs)
    return AnswerForm(
        functions=[] if choice.mode == "none" else functions,
        custom_tools=frozenset(function.name for function in functions if function.is_custom),
        grammar=output_grammar,
        grammar_fields=_grammar_fields(grammar, call_grammar, format_grammar, calls.input_of),
        call_format=calls.call_format,
        input_of=calls.input_of,
        has_channels=parsers.tool_call == CHANNELS and output_grammar is None,
        is_single=not is_parallel,
        reasoning=reasoning,
        may_begin_inside=may_begin_inside,
        is_inside=is_inside and reasoning is not None and reasoning.starts_in_prompt,
        includes_reasoning=fields.include_reasoning is not False,
    )


def _for_engine(grammar: StructuredOutputsParams | None, parsers: Parsers) -> StructuredOutputsParams | None:
    """Return a grammar that the caller has not written, without options that the engine would refuse."""
    if grammar is None or parsers.has_json_options:
        return grammar
    return msgspec.structs.replace(grammar, disable_any_whitespace=False, disable_additional_properties=False)


def _grammar_fields(
    grammar: StructuredOutputsParams | None,
    call_grammar: StructuredOutputsParams | None,
    format_grammar: StructuredOutputsParams | None,
    input_of: str,
) -> dict[str, str]:
    if grammar is not None or (call_grammar is None and format_grammar is None):
        return {}
    if call_grammar is not None:
        names = dict.fromkeys(("json", "structural_tag"), "tools")
        names |= dict.fromkeys(("grammar", "regex"), f"tools: the grammar of {shown(input_of)}")
        return {f"structured_outputs.{kind}": name for kind, name in names.items()}
    return {"structured_outputs.json": SCHEMA_FIELD, "structured_outputs.structural_tag": "response_format and tools"}


class _CallForm:
    """The format of an answer's calls, and the grammar that enforces them.

    Attributes:
        call_format, input_of: as in ``AnswerForm``.
        grammar: None if nothing is enforced.
    """

    def __init__(self, functions: list[Function], choice: ToolChoice, parsers: Parsers, *, is_parallel: bool) -> None:
        self._name = parsers.tool_call
        style = find_tool_call_style(parsers.tool_call)
        self.call_format: CallFormat | None = None
        self.input_of = ""
        self.grammar: StructuredOutputsParams | None = None
        self._native: NativeCalls | None = None
        if parsers.has_structural_tags:
            # Only our engine with xgrammar enforces the grammars of inputs within calls.
            tools = functions if parsers.forces_natively else [tool._replace(grammar=None) for tool in functions]
            self._native = native_calls(style.record.calls, tools, is_parallel=is_parallel)
        chosen = [function for function in functions if choice.name in (None, function.name)]
        if choice.mode == "auto":
            self.call_format = style.call_format
            if self._native is not None and (parsers.forces_natively or self._native.is_legacy):
                self.grammar = self._native.optional()
        elif choice.is_forced and self._native is not None and parsers.forces_natively:
            self.call_format, self.grammar = style.call_format, self._native.forced(choice)
        elif choice.is_forced and len(chosen) == 1 and chosen[0].grammar is not None and parsers.has_structural_tags:
            self.input_of, self.grammar = chosen[0].name, chosen[0].grammar.of_answer
        elif choice.is_forced:
            self.call_format = LIST_OF_CALLS if choice.name is None else named_call(choice.name)
            self.grammar = forced_json(functions, choice, is_parallel=is_parallel)

    def or_answer(self, answer: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the grammar of either calls or ``answer``.

        Raises:
            ValidationError: no grammar can enforce calls of this format.
        """
        if self._native is None:
            raise ValidationError(
                f"response_format cannot be combined with optional calls in the format {shown(self._name)}; "
                "pass tool_choice 'none', 'required' or a function"
            )
        return self._native.or_answer(answer)
