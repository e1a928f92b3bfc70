from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.reasoning import MarkRemover, ReasoningSplitter, find_reasoning_format
from penstock.shared.errors import ValidationError
from penstock.shared.params.answer_formats import REASONING_FORMATS


def split(name: str, *texts: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(REASONING_FORMATS[name])
    parts = [*(splitter.feed(text) for text in texts), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>\nFour and\n two.\n</think>\n\nSix.", "Four and\n two.", "Six."),
        ("qwen3", "\n<think></think>Six.", "", "Six."),
        ("qwen3", "Six. <think>No</think>", "", "Six. <think>No</think>"),
        ("qwen3", " <thin air", "", " <thin air"),
        ("qwen3", "<think> Four </th", "Four </th", ""),
        ("qwen3", "<think>Four</think>Six </think>", "Four", "Six </think>"),
        ("deepseek_r1", "Four\n</think>\nSix.", "Four", "Six."),
        ("deepseek_r1", "<think>Four</think>Six.", "Four", "Six."),
        ("deepseek_r1", "<th", "<th", ""),
        ("deepseek_r1", "Four ", "Four", ""),
        ("mistral", "[THINK]Four[/THINK]Six.", "Four", "Six."),
    ],
)
def test_reasoning_and_content(name: str, text: str, reasoning: str, content: str) -> None:
    assert split(name, text) == (reasoning, content)


@pytest.mark.parametrize("text", ["<answer>\nSix\n</answer>", "<answer>Six</answer>", "<answer>Six", "Six\n</answer>"])
def test_marks_around_the_answer_are_removed_wherever_the_text_is_cut(text: str) -> None:
    marks = REASONING_FORMATS["hunyuan_a13b"].answer_marks
    for pieces in ([text], [*text], [text[:9], text[9:]]):
        remover = MarkRemover(marks)
        assert "".join([*map(remover.feed, pieces), remover.finish()]) == "Six"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "\n", "<", "answer>", "so", "/"]), max_size=9).map("".join))
def test_removing_marks_does_not_depend_on_cuts(text: str) -> None:
    whole, single = (MarkRemover(REASONING_FORMATS["hunyuan_a13b"].answer_marks) for _ in range(2))
    removed = "".join([*map(single.feed, text), single.finish()])
    assert removed == whole.feed(text) + whole.finish()
    assert removed.count("so") == text.count("so")


def test_text_that_cannot_be_a_marker_is_sent_immediately() -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"])
    assert splitter.feed("<think>\nFour ") == ("Four", "")
    assert splitter.feed("and</") == (" and", "")
    assert splitter.feed("b></think>\n") == ("</b>", "")
    assert splitter.feed("Six. ") == ("", "Six. ")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"reasoning_parser must be one of .*deepseek_r1, .*, got 'r2'"):
        find_reasoning_format("r2")


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<", "think>", "</", "\n", " ", "so", "é"])


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=10).map("".join), st.data(), st.sampled_from(["qwen3", "deepseek_r1"]))
def test_any_cutting_gives_the_same(text: str, data: st.DataObject, name: str) -> None:
    at = data.draw(st.integers(0, len(text)))
    whole = split(name, text)
    assert split(name, text[:at], text[at:]) == split(name, *text) == whole
    for fragment in ("so", "é"):
        assert "".join(whole).count(fragment) == text.count(fragment)
