"""Ids of events: read back they say the same, and the next events follow from them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer import Delta, FinishReason
from penstock.producer.gateway.stream import Position
from penstock.producer.openai.answers.common import created_at, new_id
from penstock.producer.openai.endpoints import CHAT_COMPLETIONS, decode
from penstock.producer.openai.errors import OpenAIError

BODY = "0123abcd"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=64), st.booleans())
def test_an_id_reads_back(marks: list[tuple[int, bool]], has_usage: bool) -> None:
    response_id = new_id("cmpl", BODY)
    position = Position(response_id, [mark[0] for mark in marks], [mark[1] for mark in marks], has_usage=has_usage)
    again = Position.parse(str(position), len(marks), "cmpl", BODY)
    assert vars(again) == vars(position)


@pytest.mark.parametrize(
    "event_id", ["", "3", "chatcmpl-1:", "chatcmpl-1:3.4", "cmpl-1:3", "chatcmpl-1:-3", "chatcmpl-1:3e.x", "a b:1"]
)
def test_ids_of_other_streams_are_refused(event_id: str) -> None:
    with pytest.raises(OpenAIError, match="Last-Event-ID must be the id of an event"):
        Position.parse(event_id, 1, "chatcmpl", BODY)


def test_a_stream_that_another_body_began_is_refused() -> None:
    response_id = new_id("chatcmpl", BODY)
    assert abs(created_at(response_id) - time.time()) < 3600
    with pytest.raises(OpenAIError, match="another body started") as refused:
        Position.parse(f"{response_id}:3", 1, "chatcmpl", "76543210")
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")
    of_an_earlier_version = new_id("chatcmpl")
    assert Position.parse(f"{of_an_earlier_version}:3", 1, "chatcmpl", BODY).next_indexes == [3]


def test_equivalent_bodies_have_one_digest() -> None:
    def fingerprint(body: str) -> str:
        return decode(CHAT_COMPLETIONS, body.encode()).fingerprint

    messages = '"messages": [{"role": "user", "content": "hi"}]'
    same = fingerprint(f'{{"temperature": 1, "logit_bias": {{"5": 1, "6": 2}}, "tools": null, {messages}}}')
    assert same == fingerprint(f'{{{messages}, "logit_bias":{{"6":2.0,"5":1}},"temperature":1.0, "audio": null}}')
    assert same != fingerprint(f'{{{messages}, "logit_bias": {{"5": 1, "6": 3}}, "temperature": 1}}')


def test_an_end_without_tokens_is_sent_once() -> None:
    end = Delta(index=2, finish_reason=FinishReason.STOP)
    position = Position.parse("chatcmpl-1:2", 1, "chatcmpl", BODY)
    assert position.has(0, Delta(index=0, token_ids=[1, 2]))
    assert not position.has(0, end)
    position.advance(0, end)
    assert str(position) == "chatcmpl-1:2e"
    assert position.has(0, end)
