"""A side whose tokens are not those of the reference gets no speed; one that fell otherwise in a tie does."""

from __future__ import annotations

import math

import pytest

from penstock.ops.lab.bench.engines.judge import TOLERANCE, Claim, judge, wrong_lengths
from penstock.ops.lab.bench.workload import Item

TRUTH = [[5, 6, 7], [8, 9, 10]]


def test_the_same_tokens_are_right() -> None:
    claims = [Claim(0, [5, 6, 7]), Claim(1, [8, 9, 10])]
    verdict = judge(claims, [[0.0] * 3, [0.0] * 3], TRUTH, "float32")
    assert (verdict.wrong, verdict.num_identical, verdict.num_requests) == ("", 2, 2)


def test_a_tie_and_the_tokens_after_it_are_right() -> None:
    tie = TOLERANCE["float32"] / 2
    verdict = judge([Claim(0, [5, 61, 71])], [[0.0, tie, 0.0]], TRUTH, "float32")
    assert (verdict.wrong, verdict.num_identical, verdict.largest_gap) == ("", 0, tie)


@pytest.mark.parametrize("gap", [0.01, 4.0, math.nan])
def test_a_token_that_is_no_tie_is_wrong(gap: float) -> None:
    claims = [Claim(0, [5, 6, 7]), Claim(1, [8, 91, 10])]
    verdict = judge(claims, [[0.0] * 3, [0.0, gap, 0.0]], TRUTH, "float32")
    assert verdict.wrong.startswith("token 1 of request 1 lies")


def test_tokens_after_a_tie_are_judged_too() -> None:
    verdict = judge([Claim(0, [5, 61, 71])], [[0.0, TOLERANCE["float32"] / 2, 3.0]], TRUTH, "float32")
    assert verdict.wrong.startswith("token 2 of request 0")


def test_bfloat16_has_a_wider_but_finite_tolerance() -> None:
    assert not judge([Claim(0, [5])], [[0.03]], TRUTH, "bfloat16").wrong
    assert judge([Claim(0, [5])], [[1.0]], TRUTH, "bfloat16").wrong


def test_every_request_has_exactly_its_tokens() -> None:
    items = [Item([1], 2), Item([1, 2], 3)]
    assert wrong_lengths(items, [[5, 6], [7, 8, 9]]) == ""
    assert wrong_lengths(items, [[5, 6]]) == "1 outputs for 2 requests"
    assert wrong_lengths(items, [[5, 6], [7, 8]]) == "request 1 has 2 tokens, not 3"
