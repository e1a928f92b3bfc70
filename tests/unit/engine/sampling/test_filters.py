"""Filters against transformers' processors: the tokens a row can draw, and how probable each is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.worker.engine.sampling.sampler import sample

from .test_sampler import exact_probabilities, implementation, rows_of  # noqa: F401  # a fixture of every test

VOCAB_SIZE = 61
FILTERS = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.7, "min_p": 0.05},
    {"temperature": 0.6, "min_p": 0.01, "top_k": 30},
    {"min_p": 0.02, "top_k": 40, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.01, "top_k": 50, "top_p": 0.97},
]


def processed(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """Probabilities ``[V]`` after transformers' processors, in vLLM's order."""
    makers: dict[str, Any] = {
        "temperature": TemperatureLogitsWarper,
        "min_p": MinPLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
    }
    processors = LogitsProcessorList([make(params[name]) for name, make in makers.items() if name in params])
    return torch.softmax(processors(torch.zeros(1, 1, dtype=torch.long), logits[None].double())[0], dim=-1)  # type: ignore[arg-type]  # narrower than what it takes


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_a_token_is_drawn_exactly_if_transformers_keeps_it(params: dict[str, Any], scale: float) -> None:
    """The uniform numbers are swept, so that each kept token comes as often as its probability says."""
    logits = scale * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(len(params)))
    expected = processed(logits, params)
    np.testing.assert_allclose(exact_probabilities(logits, **params), expected.numpy(), atol=1e-6)
    num_draws = 4000
    rows = rows_of(num_draws, **params)
    tokens = sample(logits.expand(num_draws, -1).clone(), rows)
    token_ids = set(torch.nonzero(expected)[:, 0].tolist())
    likely = set(torch.nonzero(expected > 10 / num_draws)[:, 0].tolist())
    assert likely <= set(tokens.tolist()) <= token_ids


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=80, unique=True),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 1, 3, 70]),
    st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    st.sampled_from([0.2, 1.0, 5.0]),
)
def test_a_draw_is_among_the_tokens_that_filters_leave(
    values: list[int], min_p: float, top_k: int, top_p: float, temperature: float
) -> None:
    """Any logits, some of them minus infinity."""
    logits = torch.tensor(values, dtype=torch.float32) / 4
    logits[::3] = float("-inf")
    params = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    tokens = sample(logits.expand(32, -1).clone(), rows_of(32, **params))
    probabilities = exact_probabilities(logits, **params)
    assert (probabilities[tokens.numpy()] > 0).all()
