from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.producer import RepetitionDetectionParams, SamplingParams
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
        ("prompt_logprobs", 21, r"prompt_logprobs must be in \[0, 20\], got 21"),
        ("thinking_token_budget", -2, r"thinking_token_budget must be in \[-1, "),
        ("logit_bias", [1], r"logit_bias must be a dict from token ids to numbers, got \[1\]"),
        ("logit_bias", {"7": 1.0}, "logit_bias must have non-negative integers as keys, got '7'"),
        ("logit_bias", {-7: 1.0}, "logit_bias must have non-negative integers as keys, got -7"),
        ("logit_bias", {7: 100.5}, r"logit_bias\[7\] must be in \[-100, 100\], got 100.5"),
        ("logit_bias", {7: float("nan")}, r"logit_bias\[7\] must be in .* got nan"),
        ("logit_bias", {7: "x"}, r"logit_bias\[7\] must be a number in \[-100, 100\], got 'x'"),
        ("logit_bias", dict.fromkeys(range(16_385), 1.0), "logit_bias must hold at most 16384 token ids, got 16385"),
        ("allowed_token_ids", [], r"allowed_token_ids must hold at least one token id, got \[\]; None allows all"),
        ("allowed_token_ids", [1, True], "allowed_token_ids must be a list of non-negative integers"),
        (
            "allowed_token_ids",
            list(range(16_385)),
            "allowed_token_ids must hold at most 16384 ids, got 16385; a logit_",
        ),
        ("bad_words", "word", "bad_words must be a list of non-empty strings, got 'word'"),
        ("bad_words", ["a", ""], "bad_words must be a list of non-empty strings"),
        ("bad_words", ["a"] * 1025, "bad_words must hold at most 1024 words, got 1025"),
        ("bad_words", ["a" * 257], "bad_words must have at most 256 characters each, got 257"),
        ("repetition_detection", {"min_count": 2}, "repetition_detection must be a RepetitionDetectionParams, got {"),
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
        {"extra_args": {"a": 1}},
    ],
)
def test_unsupported_parameters_are_refused_and_not_ignored(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"{next(iter(values))}=.* is not supported"):
        SamplingParams(**values).check_supported()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_pattern_size": 2049, "min_count": 2}, r"detection.max_pattern_size must be in \[0, 2048\], got 2049"),
        ({"max_pattern_size": 2, "min_count": 1}, r"repetition_detection.min_count must be in \[2, 1000\], got 1"),
        ({"max_pattern_size": 2}, r"repetition_detection.min_count must be in \[2, 1000\], got 0"),
        ({"max_pattern_size": 2, "min_count": 2.5}, "repetition_detection.min_count must be an integer"),
        (
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            r"repetition_detection.min_pattern_size must be at most max_pattern_size \(2\), got 3",
        ),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RepetitionDetectionParams(**values)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [({"bad_words_token_ids": [[1]]}, "pass bad_words"), ({"think_token_ids": (1, 2)}, "pass thinking_token_budget")],
)
def test_a_caller_cannot_set_fields_of_the_worker(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(values))} is set by the worker; {remedy}"):
        SamplingParams(**values).check_from_caller()
    SamplingParams(bad_words=["x"], thinking_token_budget=3).check_from_caller()


def test_all_fields_survive_the_wire() -> None:
    params = SamplingParams(
        logit_bias={7: -1.5, 9: 2.0},
        allowed_token_ids=[7, 9],
        bad_words=["x"],
        thinking_token_budget=5,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3),
        bad_words_token_ids=[[1], [2, 3]],
        think_token_ids=(5, 6),
        prompt_logprobs=3,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_is_always_a_list() -> None:
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="a").stop_strings == ["a"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
