"""Readers of answers make progress with any text: the lines of code that they execute are bounded by its length."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.producer.openai.answers.channels import ChannelParser
from penstock.producer.openai.reasoning import MarkRemover, ReasoningSplitter
from penstock.producer.openai.tools.custom_input import CustomInputReader
from penstock.producer.openai.tools.formats import LIST_OF_CALLS, TOOL_CALL_PARSERS, named_call
from penstock.producer.openai.tools.parser import ToolCallParser
from penstock.shared.params.answer_formats import REASONING_FORMATS, TOOL_CALL_FORMATS

MAX_LINES_PER_CHAR = 400
SCHEMAS: dict[str, dict[str, Any]] = {"now": {"type": "object", "properties": {"at": {"type": "array"}}}}


def marks_of(record: Any) -> Iterator[str]:
    """Yield the texts of a record, whole and in halves."""
    if isinstance(record, str):
        yield from filter(None, {record, record.strip(), record[: len(record) // 2], record[len(record) // 2 :]})
    elif isinstance(record, tuple):
        yield from itertools.chain.from_iterable(map(marks_of, record))
    elif dataclasses.is_dataclass(record):
        yield from itertools.chain.from_iterable(
            marks_of(getattr(record, field.name)) for field in dataclasses.fields(record)
        )


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "to=functions.now"]
COMMON = ["now", "at", "{", "}", "[", "]", "(", ")", "=", '"', "'", "\\", "\\ud83d", ":", ",", "1", "\n", "so " * 200]
RECORDS: list[Mapping[str, Any]] = [TOOL_CALL_FORMATS, REASONING_FORMATS]
MARKS = {
    name: sorted({mark for records in RECORDS if name in records for mark in marks_of(records[name])})
    for name in sorted({*TOOL_CALL_FORMATS, *REASONING_FORMATS})
}


class Lines:
    """Counts the lines of the gateway's code that are executed, and fails beyond ``limit``."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._previous = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._previous)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if "/producer/openai/" not in frame.f_code.co_filename:
            return None
        self._left -= event == "line"
        assert self._left >= 0, f"no progress at {frame.f_code.co_qualname}, line {frame.f_lineno}"
        return self._trace


def readers(name: str) -> Iterator[tuple[Callable[[str], object], Callable[[], object]]]:
    """Yield how each reader of the formats of that name is fed, and ended."""
    formats = [LIST_OF_CALLS, named_call("now")]
    style = TOOL_CALL_PARSERS.get(name)
    if style is not None and style.call_format is not None:
        formats.append(style.call_format)
    for call_format, whole in itertools.product(formats, (True, False)):
        calls = ToolCallParser(call_format, SCHEMAS, whole=whole)
        yield calls.feed, calls.finish
    if style is not None and style.call_format is None:
        for whole in (True, False):
            channels = ChannelParser(["now"], whole=whole, is_single=False, includes_reasoning=True)
            yield channels.feed, channels.finish
    if name in REASONING_FORMATS:
        for is_inside in (True, False):
            splitter = ReasoningSplitter(REASONING_FORMATS[name], is_inside=is_inside)
            yield splitter.feed, splitter.finish
        if REASONING_FORMATS[name].answer_marks:
            remover = MarkRemover(REASONING_FORMATS[name].answer_marks)
            yield remover.feed, remover.finish
    arguments = CustomInputReader()
    yield arguments.feed, arguments.end_input


@pytest.mark.parametrize("name", MARKS)
@settings(max_examples=12, deadline=None)  # counts each line of each reader
@given(st.data())
def test_each_reader_makes_progress(name: str, data: st.DataObject) -> None:
    own = st.sampled_from(MARKS[name] + HARMONY * (name == "openai"))
    text = "".join(data.draw(st.lists(own | st.sampled_from(COMMON), max_size=12)))
    size = data.draw(st.sampled_from([1, 7, len(text) or 1]))
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for feed, finish in readers(name):
        with Lines(200 + MAX_LINES_PER_CHAR * len(text)):
            for piece in pieces:
                feed(piece)
            finish()
