"""Two deltas as one."""

from __future__ import annotations

import copy
import functools

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from penstock.shared.stats import RequestStats

logprobs = st.lists(st.builds(TokenLogprobs, st.integers(0, 9), st.just(-1.0), st.just(1), st.just([])), max_size=2)
deltas = st.builds(
    Delta,
    token_ids=st.lists(st.integers(0, 9), max_size=3),
    text=st.text("ab", max_size=3),
    finish_reason=st.sampled_from([None, FinishReason.STOP]),
    stop_reason=st.sampled_from([None, 7]),
    error=st.sampled_from([None, RequestError("c", "m")]),
    usage=st.sampled_from([None, Usage(1, 2)]),
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    stats=st.sampled_from([None, RequestStats(queue_time_s=1)]),
    segment_ends=st.lists(st.just(SegmentEnd(0, 1, FinishReason.STOP)), max_size=1),
)


@given(deltas, deltas)
def test_an_extended_delta_equals_a_new_one_of_both(delta: Delta, later: Delta) -> None:
    both, before = delta.followed_by(later), copy.deepcopy(later)
    delta.extend(later)
    assert delta == both
    assert later == before


@given(st.lists(st.text("ab", max_size=3), min_size=2, max_size=6), st.data())
def test_the_parts_of_a_split_delta_are_those_of_its_tokens(texts: list[str], data: st.DataObject) -> None:
    singles = [
        Delta(index=5 + number, token_ids=[number], text=text, logprobs=[TokenLogprobs(number, -1.0, 1, [])])
        for number, text in enumerate(texts)
    ]
    singles[-1].finish_reason = FinishReason.STOP
    whole = functools.reduce(Delta.followed_by, singles)
    index = data.draw(st.integers(6, 4 + len(texts)))
    head, rest = whole.split(index)
    assert head == functools.reduce(Delta.followed_by, singles[: index - 5])
    assert rest == functools.reduce(Delta.followed_by, singles[index - 5 :])
    assert head.followed_by(rest) == whole
