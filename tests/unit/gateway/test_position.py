"""Ids of events: read back they say the same, and what is told follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ops.gateway.position import Position
from penstock.producer import Delta, FinishReason
from penstock.producer.openai.common import new_id
from penstock.producer.openai.errors import OpenAIError


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=64), st.booleans())
def test_an_id_reads_back(marks: list[tuple[int, bool]], has_usage: bool) -> None:
    response_id = new_id("cmpl")
    position = Position(response_id, [mark[0] for mark in marks], [mark[1] for mark in marks], has_usage=has_usage)
    again = Position.parse(str(position), len(marks), "cmpl")
    assert vars(again) == vars(position)


@pytest.mark.parametrize(
    "event_id", ["", "3", "chatcmpl-1:", "chatcmpl-1:3.4", "cmpl-1:3", "chatcmpl-1:-3", "chatcmpl-1:3e.x", "a b:1"]
)
def test_what_is_no_id_of_such_a_stream_is_refused(event_id: str) -> None:
    with pytest.raises(OpenAIError, match="Last-Event-ID must be the id of an event"):
        Position.parse(event_id, 1, "chatcmpl")


def test_an_end_without_tokens_is_told_once() -> None:
    end = Delta(index=2, finish_reason=FinishReason.STOP)
    position = Position.parse("chatcmpl-1:2", 1, "chatcmpl")
    assert position.has(0, Delta(index=0, token_ids=[1, 2]))
    assert not position.has(0, end)
    position.advance(0, end)
    assert str(position) == "chatcmpl-1:2e"
    assert position.has(0, end)
