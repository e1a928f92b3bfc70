"""Parameters that an engine refuses because of its vocabulary or the prompt; the message names the field and the
reason.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import UnsupportedParameterError, ValidationError
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.sampling.param_checks import check_params

VOCAB_SIZE = 50
EOS = 2


def check(num_prompt_tokens: int = 5, **params: Any) -> None:
    check_params(SamplingParams(**params), num_prompt_tokens, VOCAB_SIZE, frozenset({EOS}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [3, 50]}, "allowed_token_ids holds 50, but the vocabulary has 50 tokens"),
        ({"logit_bias": {3: 1.0, 99: 1.0}}, "logit_bias holds 99, but the vocabulary has 50 tokens"),
        ({"bad_words_token_ids": [[3], [4, 70]]}, "bad_words_token_ids holds 70"),
        ({"bad_words_token_ids": [[3], []]}, "bad_words_token_ids must hold no empty list"),
        ({"bad_words": ["x"]}, "bad_words must come with bad_words_token_ids"),
        ({"stop_token_ids": [51]}, "stop_token_ids holds 51"),
        ({"thinking_token_budget": 3, "think_token_ids": (4, 60)}, "think_token_ids holds 60"),
        ({"allowed_token_ids": [7], "bad_words_token_ids": [[7]]}, "leave no token to choose: allow another"),
        ({"allowed_token_ids": [EOS, 7], "stop_token_ids": [7], "min_tokens": 1}, "leave no token to choose"),
        ({"bad_words_token_ids": [[1, t] for t in range(VOCAB_SIZE)]}, "leave no token to choose"),
    ],
)
def test_impossible_values_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS, 7], "min_tokens": 1},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [7], "bad_words_token_ids": [[7, 7]]},
        {"bad_words_token_ids": [[t] for t in range(VOCAB_SIZE - 1)]},
        {"bad_words": [], "thinking_token_budget": -1},
        {"prompt_logprobs": 20},
    ],
)
def test_parameters_that_leave_a_token_are_served(params: dict[str, Any]) -> None:
    check(**params)


def test_a_model_that_does_not_think_has_no_budget_for_it() -> None:
    with pytest.raises(UnsupportedParameterError, match="thinking_token_budget=5 needs a model with tokens that start"):
        check(thinking_token_budget=5)


def test_prompt_logprobs_are_limited_by_the_size_of_a_record() -> None:
    check(num_prompt_tokens=100_000, prompt_logprobs=1)
    message = "prompt_logprobs=20 for a prompt of 20000 tokens makes 419979 log probabilities, and at most 262144"
    with pytest.raises(ValidationError, match=message):
        check(num_prompt_tokens=20_000, prompt_logprobs=20)
