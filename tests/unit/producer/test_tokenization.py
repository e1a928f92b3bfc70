"""Callers' options for the tokens of a prompt: vLLM's words and those of transformers, and contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.inputs.options import RequestOptions
from penstock.producer.inputs.prompt import build_request
from penstock.producer.inputs.tokenization import tokenization_of
from penstock.producer.requests.digests import conversation_digests
from penstock.producer.requests.queue_entry import Outgoing
from penstock.shared import errors
from penstock.shared.deployment.records import ModelCard
from penstock.shared.params.prompts import Tokenization
from penstock.shared.params.sampling import SamplingParams

CARD = ModelCard(model="m", max_model_len=20, vocab_size=100)
MESSAGES = [{"role": "user", "content": "x" * 1000}]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (None, None),
        ({}, None),
        ({"truncation": False}, None),
        ({"truncate_prompt_tokens": None}, None),
        ({"truncate_prompt_tokens": 5}, Tokenization(truncate_prompt_tokens=5)),
        ({"truncation": True, "max_length": 5}, Tokenization(truncate_prompt_tokens=5)),
        ({"truncation": True}, Tokenization(truncate_prompt_tokens=-1)),
        ({"add_special_tokens": False}, Tokenization(add_special_tokens=False)),
        (
            {"truncate_prompt_tokens": -1, "truncation_side": "right"},
            Tokenization(truncate_prompt_tokens=-1, truncation_side="right"),
        ),
    ],
)
def test_both_vocabularies_mean_the_same(kwargs: Any, expected: Tokenization | None) -> None:
    assert tokenization_of(RequestOptions(tokenization_kwargs=kwargs)) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ([5], "tokenization_kwargs must be a dict"),
        ({"padding": True}, "may have add_special_tokens, .*got 'padding'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be a number of tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens must be a number of tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens must be a number of tokens"),
        ({"max_length": 5}, "max_length needs truncation=True"),
        ({"truncation": "only_first"}, "truncation must be True or False"),
        ({"truncation": True, "max_length": 5, "truncate_prompt_tokens": 6}, "are the same option; pass one"),
        ({"truncation_side": "middle"}, "truncation_side must be 'left' or 'right'"),
        ({"add_special_tokens": 1}, "add_special_tokens must be True or False"),
    ],
)
def test_unsupported_arguments_are_named(kwargs: Any, message: str) -> None:
    with pytest.raises(errors.ValidationError, match=message):
        tokenization_of(RequestOptions(tokenization_kwargs=kwargs))


@pytest.mark.parametrize(
    ("params", "kwargs", "message"),
    [
        (SamplingParams(truncate_prompt_tokens=21), None, r"at most max_model_len \(20\), got 21"),
        (SamplingParams(truncate_prompt_tokens=5), {"truncate_prompt_tokens": 6}, "5 in the parameters and 6 in"),
        (SamplingParams(truncate_prompt_tokens=-1, max_tokens=20), None, "no token of the prompt is left"),
    ],
)
def test_the_client_refuses_unsupported_tokenization(params: SamplingParams, kwargs: Any, message: str) -> None:
    with pytest.raises(errors.ValidationError, match=message):
        build_request([1], params, card=CARD, options=RequestOptions(tokenization_kwargs=kwargs))


def test_token_ids_that_are_cut_may_be_more_than_the_model_takes() -> None:
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=4)
    request = build_request([1] * 50, params, card=CARD)
    assert request.prompt_token_ids == [1] * 50, "the worker cuts: its engine may take more, or less"
    entry = Outgoing(request, {}, 20).entry(result_ttl_ms=1, fail_fast=False, max_payload_bytes=10_000)
    assert entry.num_prompt_tokens == 50
    request = build_request([1] * 50, SamplingParams(truncate_prompt_tokens=6, max_tokens=4), card=CARD)
    entry = Outgoing(request, {}, 20).entry(result_ttl_ms=1, fail_fast=False, max_payload_bytes=10_000)
    assert (entry.num_prompt_tokens, entry.max_tokens) == (6, 4)
    with pytest.raises(errors.PromptTooLongError):
        build_request([1] * 50, SamplingParams(max_tokens=4), card=CARD)


def test_conversations_that_are_cut_in_different_ways_are_not_taken_for_one() -> None:
    """An engine's cache has the beginning of neither, if the other's was cut."""
    each = [
        build_request(MESSAGES, params, card=CARD, options=RequestOptions(tokenization_kwargs=kwargs))
        for params, kwargs in (
            (SamplingParams(max_tokens=4), None),
            (SamplingParams(max_tokens=4, truncate_prompt_tokens=8), None),
            (SamplingParams(max_tokens=4, truncate_prompt_tokens=9), None),
            (SamplingParams(max_tokens=4), {"add_special_tokens": True}),
        )
    ]
    own = [conversation_digests(request).own for request in each]
    assert len(set(own)) == 4
    assert all(len(digests) == 1 for digests in own)
