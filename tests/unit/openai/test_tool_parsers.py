"""The calls that the parsers read in texts do not depend on the cuts of a text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.tools.call_reader import CallPiece, Content, joined
from penstock.producer.openai.tools.formats import LIST_OF_CALLS, TOOL_CALL_PARSERS, CallFormat, named_call
from penstock.producer.openai.tools.parser import ToolCallParser


def format_of(name: str) -> CallFormat:
    call_format = TOOL_CALL_PARSERS[name].call_format
    assert call_format is not None
    return call_format


HERMES, LLAMA3_JSON, MISTRAL = map(format_of, ("hermes", "llama3_json", "mistral"))
FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "list": LIST_OF_CALLS,
    "named": named_call("add"),
}
SCHEMAS: dict[str, dict[str, Any]] = {"add": {}, "weather": {}}
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ADDED = ("add", '{"a": 1, "b": [2, "}"]}')
Parsed = tuple[str, list[tuple[str, str]]]


def parsed(call_format: CallFormat, *texts: str, whole: bool = False, is_cut: bool = False) -> Parsed:
    parser = ToolCallParser(call_format, SCHEMAS, whole=whole)
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return joined(pieces + parser.finish(is_cut=is_cut))


CALLS = [
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [ADDED]),
    (HERMES, f"I add.\n\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}", "I add.", [ADDED, ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>\nDone.", "\nDone.", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool", "", [ADDED]),
    (HERMES, '<tool_call>{"arguments": {}, "id": [1e3, null], "name": "new"}</tool_call>', "", [("new", "{}")]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (LLAMA3_JSON, ADD.replace("arguments", "parameters"), "", [ADDED]),
    (LLAMA3_JSON, f"<|python_tag|>{ADD}; {ADD}", "", [ADDED, ADDED]),
    (LLAMA3_JSON, f" {ADD};{ADD};", "", [ADDED, ADDED]),
    (LLAMA3_JSON, f"So: {ADD}", f"So: {ADD}", []),
    (LLAMA3_JSON, f"So: <|python_tag|>{ADD} and", "So: and", [ADDED]),
    (LLAMA3_JSON, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA3_JSON, '<|python_tag|>print("a")', '<|python_tag|>print("a")', []),
    (MISTRAL, f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [ADDED, ADDED]),
    (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ADDED[1]}[TOOL_CALLS]weather[ARGS] {{}}", "", [ADDED, ("weather", "{}")]),
    (MISTRAL, 'Well, [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "Well,", [("add", '{"a": 1}')]),
    (MISTRAL, "Is [TOOL_CALLS] a marker?", "Is [TOOL_CALLS] a marker?", []),
    (LIST_OF_CALLS, f"[{ADD}]", "", [ADDED]),
    (FORMATS["named"], '{"a": 1}', "", [("add", '{"a": 1}')]),
]


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CALLS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("whole", [True, False])
def test_calls_and_content(
    call_format: CallFormat, text: str, content: str, calls: list[tuple[str, str]], whole: bool
) -> None:
    assert parsed(call_format, text, whole=whole) == (content, calls)
    assert parsed(call_format, *text, whole=whole) == (content, calls)


MALFORMED = [
    ('<tool_call>{"name": "add", "arguments": {"a": x}}</tool_call>', '{"a": ', "x}}</tool_call>"),
    ('<tool_call>{"name": "add", "arguments": {"a": "line\nend"}}</tool_call>', '{"a": "line', '\nend"}}</tool_call>'),
    ('<tool_call>{"name": "add", "arguments": {} "x"}</tool_call>', "{}", ' "x"}</tool_call>'),
]


@pytest.mark.parametrize(("text", "arguments", "rest"), MALFORMED)
def test_a_malformed_call_is_returned_as_content(text: str, arguments: str, rest: str) -> None:
    text = "Well. " + text
    assert parsed(HERMES, text, whole=True) == (text, [])
    # Streamed text cannot be withdrawn: the text behind the mistake is content.
    assert parsed(HERMES, text) == ("Well." + rest, [("add", arguments)])


@pytest.mark.parametrize(
    "inside", ["", "{}", "[]", '{"name": ""}', '{"name": "a", "name": "b"}', '{"arguments": {}}', "{" * 99]
)
def test_text_that_is_no_call_is_content_in_streams_too(inside: str) -> None:
    text = f"So <tool_call>{inside}</tool_call> <tool_call>"
    assert parsed(HERMES, text) == parsed(HERMES, text, whole=True) == (text, [])


def test_a_call_cut_by_a_limit_keeps_its_received_part() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert parsed(HERMES, text, whole=True, is_cut=True) == ("", [("add", '{"a": 1')])
    assert parsed(HERMES, text) == ("", [("add", '{"a": 1')])
    assert parsed(HERMES, text, whole=True) == (text, [])
    assert parsed(HERMES, '<tool_call>{"name": "ad', is_cut=True) == ('<tool_call>{"name": "ad', [])


def test_the_name_is_sent_first_and_arguments_as_they_arrive() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.feed('<tool_call>{"name": "add", "arguments": ') == []
    assert parser.feed('{"a"') == [CallPiece(0, "add", '{"a"')]
    assert parser.feed(": 1}") == [CallPiece(0, None, ": 1}")]
    assert parser.feed("}</tool_call>\n") == []
    assert parser.feed("<tool") == []
    assert parser.feed("s>") == [Content("\n<tools>")]
    assert parser.finish() == []


MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "add", ";", "\n", " ", "[", "]"]
JSON = [
    ADD,
    ADD[:25],
    ADD[25:],
    "{",
    "}",
    '"',
    ",",
    ":",
    '"name": "add"',
    '"parameters": {"é": -0.5e1}',
    "\\u00e9",
    "é",
]
FRAGMENTS = st.sampled_from([*MARKS, *JSON])


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = "".join(draw(st.lists(FRAGMENTS, max_size=12)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@settings(max_examples=300, deadline=None)
@given(cut_texts(), st.sampled_from(sorted(FORMATS)), st.booleans(), st.booleans())
def test_any_cutting_gives_the_same_and_loses_nothing(texts: list[str], name: str, whole: bool, is_cut: bool) -> None:
    text = "".join(texts)
    content, calls = parsed(FORMATS[name], *texts, whole=whole, is_cut=is_cut)
    assert parsed(FORMATS[name], text, whole=whole, is_cut=is_cut) == (content, calls)
    assert parsed(FORMATS[name], *text, whole=whole, is_cut=is_cut) == (content, calls)
    if not calls:
        assert content == text
    if whole and not is_cut:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
