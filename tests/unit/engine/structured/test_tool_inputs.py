"""Inputs of custom tools follow their grammars: as the whole answer, and within calls of each family's format."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from penstock.producer.openai.tools.call_reader import joined
from penstock.producer.openai.tools.custom import InputGrammar
from penstock.producer.openai.tools.custom_input import decoded_input
from penstock.producer.openai.tools.definitions import Function, ToolChoice, read_tools
from penstock.producer.openai.tools.forcing import NativeCalls, native_calls
from penstock.producer.openai.tools.formats import TOOL_CALL_PARSERS
from penstock.producer.openai.tools.parser import InputParser, ToolCallParser
from penstock.shared.errors import ValidationError
from penstock.shared.params.answer_formats import TOOL_CALL_FORMATS
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.structured.constraint import GrammarConstraint
from penstock.worker.engine.structured.spec import spec_of

from .walking import EOS, VOCABULARY, load, walk

# The same texts, with all that JSON escapes.
GRAMMARS = {
    "lark": r"""
start: "*** \"Patch\"" LF line+ end
line: ("+" | "-") /[a-c"\\é]{0,3}/ LF
end: "\\end"i
%import common.LF
""",
    "regex": r'\*\*\* "Patch"\n([+-][a-c"\\é]{0,3}\n)+\\[Ee][Nn][Dd]',
}
INPUT = re.compile(GRAMMARS["regex"])


def functions(grammar: InputGrammar) -> list[Function]:
    form = {"type": "grammar", "grammar": {"syntax": grammar.syntax, "definition": grammar.definition}}
    custom = {"type": "custom", "custom": {"name": grammar.tool, "format": form}}
    return read_tools([custom, {"type": "function", "function": {"name": "now"}}])


def native(name: str, grammar: InputGrammar) -> NativeCalls | None:
    return native_calls(TOOL_CALL_FORMATS[name].calls, functions(grammar), is_parallel=False)


PATCH = InputGrammar("patch", "lark", GRAMMARS["lark"])
SUPPORTED = [name for name in TOOL_CALL_FORMATS if native(name, PATCH) is not None]


def outputs(backend: str, params: StructuredOutputsParams | None, num: int = 4) -> list[str]:
    """Return outputs at random."""
    assert params is not None
    grammar = load(backend).compile(spec_of(params))
    texts: list[str] = []
    for seed in range(40):
        constraint = GrammarConstraint("", grammar.start(frozenset([EOS])), VOCABULARY.size, frozenset([EOS]))
        text, failure = walk(constraint, Random(seed))
        assert failure is None
        texts += [] if text is None else [text.decode()]
        if len(texts) == num:
            return texts
    raise AssertionError("too few outputs have an end")


def read(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    call_format = TOOL_CALL_PARSERS[name].call_format
    assert call_format is not None
    schemas = {function.name: function.parameters for function in functions(PATCH)}
    parser = ToolCallParser(call_format, schemas, whole=True)
    content, calls = joined(parser.feed(text) + parser.finish())
    return content.strip(), [(function, decoded_input(arguments)) for function, arguments in calls]


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("syntax", GRAMMARS)
def test_an_answer_is_the_input(backend: str, syntax: str) -> None:
    for text in outputs(backend, InputGrammar("patch", syntax, GRAMMARS[syntax]).of_answer):
        assert INPUT.fullmatch(text)
        parser = InputParser("patch")
        parts = [parser.feed(part) for part in (text[:9], "", text[9:])]
        (call,) = joined([*parts[0], *parts[1], *parts[2], *parser.finish()])[1]
        assert (call[0], json.loads(call[1])) == ("patch", {"input": text})


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("syntax", GRAMMARS)
def test_inputs_within_calls_follow_the_grammar(name: str, syntax: str) -> None:
    calls = native(name, InputGrammar("patch", syntax, GRAMMARS[syntax]))
    assert calls is not None
    texts = outputs("xgrammar", calls.forced(ToolChoice("required", "patch")), num=2)
    optional = calls.optional()
    assert optional is not None
    grammar = load("xgrammar").compile(spec_of(optional)).start(frozenset([EOS]))

    def accepts(text: str) -> bool:
        tokens = [*text.encode(), EOS]
        return grammar.validate_tokens(tokens) == tokens

    for text in texts:
        content, ((function, argument),) = read(name, text)
        assert (content, function) == ("", "patch")
        assert INPUT.fullmatch(argument)
        assert accepts(text)
        assert accepts(f"I patch. {text}")
        assert not accepts(text.replace("***", "**"))
    for text in outputs("xgrammar", calls.forced(ToolChoice("required", "now")), num=1):
        assert accepts(text)


def test_an_invalid_grammar_is_refused_by_its_tool() -> None:
    hermes = native("hermes", InputGrammar("patch", "lark", 'start: "a" nope'))
    assert hermes is not None
    with pytest.raises(ValidationError, match=r"structural_tag: the grammar of 'patch' is refused by xgrammar: .*nope"):
        load("xgrammar").compile(spec_of(hermes.forced(ToolChoice("required"))))
    for definition in ("(a", "a(?=b)", "[z-a]"):
        coder = native("hermes", InputGrammar("patch", "regex", definition))
        assert coder is not None
        with pytest.raises(ValidationError, match=r"structural_tag: the grammar of 'patch'"):
            load("xgrammar").compile(spec_of(coder.forced(ToolChoice("required"))))
    flags = InputGrammar("patch", "lark", "start: /a/i")
    for name, is_refused in (("hermes", True), ("qwen3_coder", False)):
        calls = native(name, flags)
        assert calls is not None
        params = calls.forced(ToolChoice("required", "patch"))
        if not is_refused:
            assert {argument for text in outputs("xgrammar", params) for _, argument in read(name, text)[1]} <= {
                "a",
                "A",
            }
            continue
        with pytest.raises(ValidationError, match="not supported within JSON"):
            load("xgrammar").compile(spec_of(params))
