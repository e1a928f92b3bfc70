"""Input of a custom tool, read from the JSON arguments that a model writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.openai.tools.custom_input import CustomInputReader

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text('\\"/\n\t\U0001f600\u2028u{}')


def read(*parts: str) -> str:
    reader = CustomInputReader()
    return "".join([*map(reader.feed, parts), reader.end_input()])


@given(TEXTS, st.booleans(), st.booleans())
def test_any_cut_gives_the_same_input(text: str, is_ascii: bool, is_spaced: bool) -> None:
    separators = (" , ", " : ") if is_spaced else (",", ":")
    arguments = json.dumps({"input": text, "more": [1]}, ensure_ascii=is_ascii, separators=separators)
    assert read(arguments) == text
    assert read(*arguments) == text
    for cut in range(len(arguments)):
        assert read(arguments[:cut], arguments[cut:]) == text


@given(st.text("ab é*+"))
def test_text_without_escapes_is_sent_character_by_character(text: str) -> None:
    reader = CustomInputReader()
    assert reader.feed('{"input": "') == ""
    assert [reader.feed(char) for char in text] == list(text)
    assert reader.feed('"}') == reader.end_input() == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "cut in the mid', "cut in the mid"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "\\ud83d', "\ufffd"),
        ('{"input": "\\ud83dx\\ude00"}', "\ufffdx\ufffd"),
        ('{"input": "\\uzzzzzz"}', "\ufffdzzzzzz"),
        ('{"other": 1, "input": "later"}', "later"),
        ('{"patch": "no such key"}', '{"patch": "no such key"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_other_arguments(arguments: str, expected: str) -> None:
    assert read(arguments) == expected
    assert read(*arguments) == expected
