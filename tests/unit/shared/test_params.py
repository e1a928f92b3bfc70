from __future__ import annotations

from typing import Any

import pytest

from penstock.producer import SamplingParams
from penstock.shared.errors import UnsupportedParameterError, ValidationError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must be in \[0, 100\], got -0.1"),
        ("temperature", "hot", "temperature must be a number in .* got 'hot'"),
        ("temperature", float("nan"), "temperature must be in .* got nan"),
        ("top_p", 0, r"top_p must be in \(0, 1\], got 0"),
        ("top_p", 1.01, r"top_p must be in \[0, 1\], got 1.01"),
        ("top_k", -2, r"top_k must be in \[-1, "),
        ("top_k", 1.5, "top_k must be an integer"),
        ("min_p", 2, "min_p must be in"),
        ("seed", -1, "seed must be in"),
        ("seed", True, "seed must be an integer"),
        ("max_tokens", 0, r"max_tokens must be in \[1, "),
        ("min_tokens", -1, "min_tokens must be in"),
        ("stop", [""], "stop must be a non-empty string or a list of such strings"),
        ("stop", ["x"] * 17, "stop must hold at most 16 strings, got 17"),
        ("stop", "x" * 300, "at most 256 characters, got 300"),
        ("stop", 3, "stop must be"),
        ("stop_token_ids", [-1], "stop_token_ids must be a list of non-negative integers"),
        ("stop_token_ids", "12", "stop_token_ids must be a list"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("logprobs", 21, r"logprobs must be in \[0, 20\], got 21"),
        ("frequency_penalty", 2.1, r"frequency_penalty must be in \[-2, 2\], got 2.1"),
        ("repetition_penalty", 0, r"repetition_penalty must be in \[0.01, 100\], got 0"),
        ("n", 0, r"n must be in \[1, 64\], got 0"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_range(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingParams(**{field: value})


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(ValidationError, match="stop needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 2},
        {"prompt_logprobs": 1},
        {"logit_bias": {1: 2.0}},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
    ],
)
def test_what_cannot_be_honoured_is_refused_and_not_ignored(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"{next(iter(values))}=.* is not supported"):
        SamplingParams(**values).check_supported()


def test_stop_is_a_list_whichever_way_it_was_given() -> None:
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="a").stop_strings == ["a"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
