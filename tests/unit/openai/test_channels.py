"""Answers in OpenAI's harmony format are read alike wherever their text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.answers.channels import ChannelParser
from penstock.producer.openai.answers.parts import MessageParts

ANALYSIS = "<|channel|>analysis<|message|>I need <the weather>.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>'
OLDER_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
FINAL = "<|channel|>final<|message|>It is <warm>.<|return|>"
NEXT = "<|start|>assistant"
WEATHER = [("weather", '{"city": "Bonn"}')]


def read(*texts: str, whole: bool = False, is_cut: bool = False, single: bool = False) -> tuple[str, str, Any]:
    parser = ChannelParser(["weather", "now"], whole=whole, is_single=single, includes_reasoning=True)
    parts = MessageParts()
    for text in texts:
        parts = parts.followed_by(parser.feed(text))
    parts = parts.followed_by(parser.finish(is_cut=is_cut))
    calls = [(call["function"].get("name"), call["function"]["arguments"]) for call in parts.tool_calls]
    return parts.reasoning, parts.content, calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (ANALYSIS + NEXT + FINAL, "I need <the weather>.", "It is <warm>.", []),
        (ANALYSIS + NEXT + CALL, "I need <the weather>.", "", WEATHER),
        (ANALYSIS + NEXT + OLDER_CALL, "I need <the weather>.", "", WEATHER),
        (CALL.removesuffix("<|call|>"), "", "", WEATHER),
        (
            f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}{NEXT}{ANALYSIS}{NEXT}{FINAL}",
            "I need <the weather>.\nI need <the weather>.",
            "I look.\nIt is <warm>.",
            WEATHER,
        ),
        (FINAL.removesuffix("<|return|>"), "", "It is <warm>.", []),
        ("It has no header.", "", "It has no header.", []),
        ("<|channel|>commentary to=functions.now json<|message|><|call|>", "", "", [("now", "{}")]),
        (ANALYSIS.removesuffix("<|end|>") + FINAL, "I need <the weather>.", "It is <warm>.", []),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_messages_of_each_channel(text: str, reasoning: str, content: str, calls: Any, whole: bool) -> None:
    assert read(text, whole=whole) == (reasoning, content, calls)
    assert read(*text, whole=whole) == (reasoning, content, calls)
    for cut in range(len(text)):
        assert read(text[:cut], text[cut:], whole=whole) == (reasoning, content, calls)


def test_a_call_that_is_no_json_is_content_when_it_is_whole() -> None:
    text = CALL.replace('{"city": "Bonn"}', '{"city": ')
    assert read(text, whole=True) == ("", text.removesuffix("<|call|>"), [])
    assert read(text, whole=True, is_cut=True)[2] == [] or read(text, is_cut=True)[2]
    assert read(text.removesuffix("<|call|>"), whole=True, is_cut=True)[2] == [("weather", '{"city": ')]


def test_a_call_of_an_unknown_function_is_content() -> None:
    text = CALL.replace("weather", "whether")
    assert read(text) == ("", '{"city": "Bonn"}', [])


def test_only_the_first_call_is_returned_if_one_is_allowed() -> None:
    assert read(CALL + NEXT + CALL, single=True)[2] == WEATHER
    assert len(read(CALL + NEXT + CALL)[2]) == 2


@pytest.mark.parametrize("begin", ["<|channel|>", "<|start|>assistant", f"{FINAL}{NEXT}"])
def test_text_without_the_end_of_a_header_is_content(begin: str) -> None:
    text = begin + "so " * 400 + "<|channel|>" + "and " * 300
    for pieces in ([text], [*text], [text[:700], text[700:]]):
        _, content, calls = read(*pieces)
        assert (content.count("so "), content.count("and "), calls) == (400, 300, [])


MARKS = ["<|message|>", "<|end|>", "<|channel|>", " to=functions.now", "{", "so", "<|", "so " * 200]
FRAGMENTS = [ANALYSIS, CALL, FINAL, NEXT, *MARKS]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), st.data(), st.booleans(), st.booleans())
def test_any_cutting_gives_the_same(text: str, data: st.DataObject, whole: bool, is_cut: bool) -> None:
    cut = data.draw(st.integers(0, len(text)))
    expected = read(text, whole=whole, is_cut=is_cut)
    assert read(*text, whole=whole, is_cut=is_cut) == expected
    assert read(text[:cut], text[cut:], whole=whole, is_cut=is_cut) == expected
    if whole and not is_cut:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in expected[2])
