"""A thinking budget: the step that forces the end, and the requests that it applies to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.sampling.sampler import SamplingTable, sample
from penstock.worker.engine.scheduling.request import Request

START, END = 8, 9
VOCAB_SIZE = 12


def make_request(prompt: list[int], output: list[int], **params: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": None, "think_token_ids": (START, END), **params}
    return Request("r", prompt, SamplingParams(**options), max_model_len=100, output_token_ids=output)


def is_forced(*requests: Request) -> list[bool]:
    """Whether each request gets the end of thinking, whatever the model says."""
    table = SamplingTable(len(requests))
    for row, request in enumerate(requests):
        table.set_row(row, request)
    return sampled(table, requests)


def sampled(table: SamplingTable, requests: tuple[Request, ...]) -> list[bool]:
    rows = table.select(np.arange(len(requests)), np.array([request.num_tokens for request in requests]))
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[:, END] = -50.0
    return (sample(logits, rows) == END).tolist()


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([1], [], False),
        ([1], [1, 1, 1, 1], False),
        ([1], [START, 1, 1], False),
        ([1], [START, 1, 1, 1], True),
        ([1], [1, 1, START, 1, 1, 1], True),
        ([1], [START, 1, 1, 1, END, 1, 1, 1, 1], False),
        ([1], [START, 1, END, 1, START, 1, 1], False),
        ([1], [START, 1, END, 1, START, 1, 1, 1], True),
        # A second start inside is a token like any other.
        ([1], [START, 1, START, 1], True),
        ([1, START], [1, 1], False),
        ([1, START], [1, 1, 1], True),
        # The prompt's thinking counts, from its last start on.
        ([1, START, 1, 1], [1], True),
        ([START, 1, 1, 1, 1, START, 1], [1], False),
        ([1, START, 1, 1, END, 1], [1, 1, 1], False),
        ([1, END, START], [1, 1, 1], True),
    ],
)
def test_the_end_is_forced_after_three_tokens(prompt: list[int], output: list[int], expected: bool) -> None:
    assert is_forced(make_request(prompt, output, thinking_token_budget=3)) == [expected]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"thinking_token_budget": 0}, True),
        ({"thinking_token_budget": -1}, False),
        ({"thinking_token_budget": None}, False),
        ({"thinking_token_budget": 0, "temperature": 1.0, "seed": 4}, True),
        ({"thinking_token_budget": 0, "allowed_token_ids": [1, 2]}, True),
        ({"thinking_token_budget": 0, "logit_bias": {END: -100.0}, "presence_penalty": 2.0}, True),
        ({"thinking_token_budget": 0, "bad_words_token_ids": [[END]]}, True),
    ],
)
def test_nothing_goes_before_it(params: dict[str, Any], expected: bool) -> None:
    assert is_forced(make_request([1, START], [], **params)) == [expected]


def test_rows_count_for_themselves() -> None:
    requests = tuple(make_request([1, START], [1] * i, thinking_token_budget=2) for i in range(4))
    assert is_forced(*requests, make_request([START], [1, 1])) == [False, False, True, True, False]


tokens = st.lists(st.sampled_from([1, START, END]), max_size=14)


@given(tokens, tokens, st.integers(0, 4), st.integers(0, 14))
def test_counting_token_by_token_is_counting_all_at_once(
    prompt: list[int], output: list[int], budget: int, num_delivered: int
) -> None:
    """Whatever was delivered by a former engine."""
    request = make_request([1, *prompt], output[:num_delivered], thinking_token_budget=budget)
    table = SamplingTable(1)
    table.set_row(0, request)
    for token_id in output[num_delivered:]:
        table.append_tokens(np.array([0]), np.array([token_id]))
        request.token_ids.append(token_id)
    assert sampled(table, (request,)) == is_forced(request)


@given(st.lists(st.sampled_from([1, START, END]), max_size=14), st.integers(0, 4))
def test_no_section_is_longer_than_the_budget(token_ids: list[int], budget: int) -> None:
    request = make_request([1], [], thinking_token_budget=budget)
    for token_id in token_ids:
        request.token_ids.append(END if is_forced(request) == [True] else token_id)
    num_thought: int | None = None
    for token_id in request.token_ids:
        if num_thought is not None:
            num_thought = None if token_id == END else num_thought + 1
        elif token_id == START:
            num_thought = 0
        assert num_thought is None or num_thought <= budget
